"""The plan: which samples form which pack, in which order, and which are set aside."""

from typing import Any

import numpy as np

from offline_packing.admission import Admission, Budgets, admit_samples
from offline_packing.pack_order import reorder_packs, shuffled_order
from offline_packing.pack_plan import PackPlan, PlanInfo
from offline_packing.strategies import COMPOSERS, STRATEGIES
from offline_packing.strategies.expand import expand_composition
from offline_packing.strategies.histogram import count_lengths, lower_bound
from offline_packing.strategies.packs import Packs


def plan_packs(
    num_tokens: np.ndarray,
    seq_length: int,
    *,
    strategy: str = "auto",
    seed: int = 0,
    pad_multiple: int = 1,
    budgets: Budgets | None = None,
    shuffle: bool = True,
    strategy_options: dict[str, Any] | None = None,
) -> PackPlan:
    """Pack samples into sequences of ``seq_length`` tokens.

    Args:
        num_tokens: integer array (num_samples,), tokens of each sample.
        seq_length: tokens that a pack may hold.
        strategy: a name in ``STRATEGIES``.
        seed: decides every random choice; the same input and seed give the same plan.
        pad_multiple: each sample counts as its length rounded up to this multiple.
        budgets: further limits per pack: name -> (integer array (num_samples,), limit).
        shuffle: random choice among samples of equal length, and random order of packs.
        strategy_options: keyword arguments of the strategy.

    Returns:
        The plan. Samples that fit no pack are in ``set_aside_ids``, with a reason each.

    Raises:
        ValueError: an argument is out of range, or the strategy is unknown.
    """
    check_strategy(strategy)
    admission = admit_samples(num_tokens, seq_length, pad_multiple=pad_multiple, budgets=budgets)
    lengths = admission.lengths
    counts = count_lengths(lengths, seq_length)
    bound = lower_bound(counts)
    options = strategy_options or {}
    if strategy in COMPOSERS:
        composition = COMPOSERS[strategy](counts, seed=seed, **options)
        bound = max(bound, composition.lower_bound)
        packs = expand_composition(composition, lengths, counts, seed=seed if shuffle else None)
    else:
        packs = STRATEGIES[strategy](lengths, seq_length, seed=seed, **options)
    if shuffle:
        packs = reorder_packs(packs, shuffled_order(packs.num_packs, seed))
    info = PlanInfo(
        seq_length=seq_length,
        strategy=strategy,
        seed=seed,
        pad_multiple=pad_multiple,
        num_tokens=int(np.dot(counts, np.arange(len(counts)))),
        lower_bound=bound,
        reason_names=admission.reason_names,
    )
    return _plan(packs, admission, info)


def check_strategy(name: str) -> None:
    """Raise ValueError with the valid names if there is no such strategy."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r} is unknown; choose one of {', '.join(STRATEGIES)}")


def _plan(packs: Packs, admission: Admission, info: PlanInfo) -> PackPlan:
    """Packs of admitted samples, named by their index in the input."""
    sample_ids = packs.sample_ids
    if admission.sample_ids is not None:
        sample_ids = admission.sample_ids[sample_ids]
    return PackPlan(
        sample_ids,
        packs.pack_offsets,
        admission.set_aside_ids,
        admission.set_aside_reasons,
        info,
    )
