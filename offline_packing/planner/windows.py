"""Packing in windows: samples in the order of their source, or a stream of them.

Each window takes the next samples into a pool and composes packs from the pool; full packs are
given out, the samples of the others stay for the next window. In a stream, a sample stays at most
``max_age`` windows, and ``max_carried`` samples at most stay at all: beyond either limit packs go
out unfilled. Windows that hold less than a pack count as the part of one that they hold, and the
samples of one pack may always stay: so no pack goes out before it could be filled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offline_packing.planner.samples import check_known
from offline_packing.planner.strategies import STRATEGIES, check_options, lacks_limits
from offline_packing.planner.strategies.composition import (
    Composition,
    count_lengths,
    expand_composition,
    select_patterns,
)
from offline_packing.planner.strategies.kernels import Kernel, shuffle_between
from offline_packing.planner.strategies.narrow_fill import fills_by_fitness
from offline_packing.planner.strategies.strategy import Packs, join_packs, reorder_packs
from offline_packing.planner.strategies.subset_fill import subset_fill
from task_encoders.field_types import Count, NonNegative, Share, check_fields

_SPARE = 0.005  # packs' worth of samples that a window has beyond those it gives out
_MIN_SPARE_PACKS = 4
_WORTH_A_PLAN = 500  # new samples from which a stream's window is also planned like others
_FULL = 0.995  # share of seq_length at which a window does not hold a pack back


def pack_window(lengths: np.ndarray, seq_length: int, *, seed: int) -> Packs:
    """Fill packs exactly with the few hundred to few thousand samples of a window, the fullest
    packs first, and the oldest samples of a length first. Narrow and broad distributions have a
    method each; if it leaves more than 2% of the tokens in unfilled packs, the other method is
    tried too."""
    lengths = np.ascontiguousarray(lengths, np.int32)
    counts = count_lengths(lengths, seq_length)

    def full_packs(composition: Composition) -> int:
        return int(composition.multiplicity[composition.pattern_tokens() == seq_length].sum())

    method, other_method = fills_by_fitness(counts)
    best = method(counts, seed=seed)
    if full_packs(best) * seq_length < 0.98 * (counts @ np.arange(seq_length + 1)):
        best = max(best, other_method(counts, seed=seed), key=full_packs)
    fullest_first = np.argsort(-best.pattern_tokens(), kind="stable")
    return expand_composition(select_patterns(best, fullest_first), lengths, counts)


def pack_in_order(
    lengths: np.ndarray, seq_length: int, order: np.ndarray, *, window_packs: int, seed: int = 0
) -> Packs:
    """Pack the samples in the given order, exactly ``window_packs`` packs at a time.

    A window composes packs of slightly more samples than it needs and leaves the samples of the
    emptiest packs to the next window, which must use them: so each run of ``window_packs`` packs,
    which may be one output shard, reads one stretch of ``order`` and a few samples before it.
    Inside a window the packs are shuffled.
    """
    ends = np.cumsum(lengths[order], dtype=np.int64)  # tokens up to and with each sample
    wanted = seq_length * (window_packs + max(_MIN_SPARE_PACKS, round(_SPARE * window_packs)))
    parts: list[Packs] = []
    carried = np.zeros(0, np.int64)
    start = 0
    while start < len(order) or len(carried):
        before = ends[start - 1] if start else 0
        missing = wanted - int(lengths[carried].sum(dtype=np.int64))
        end = min(len(order), int(np.searchsorted(ends, before + missing)) + 1)
        window_seed = seed + len(parts)
        pool = np.concatenate([carried, order[start:end]])
        packs = pack_window(lengths[pool], seq_length, seed=window_seed)
        chosen = np.arange(packs.num_packs)
        if end < len(order):
            # First packs with carried samples, then full ones, many samples before few so that few
            # have to be read again, and last the others from fullest to emptiest.
            tokens, starts = packs.sums(lengths[pool]), packs.pack_offsets[:-1]
            carries = np.minimum.reduceat(packs.sample_ids, starts) < len(carried)
            full = tokens >= _FULL * seq_length
            rank = np.where(full, -np.diff(packs.pack_offsets), seq_length - tokens)
            chosen = np.lexsort((rank, ~full, ~carries))[:window_packs]
        ready = reorder_packs(packs, np.random.default_rng(window_seed).permutation(chosen))
        parts.append(ready.of(pool))
        carried = np.delete(pool, ready.sample_ids)
        start = end
    return join_packs(parts)


@dataclass(frozen=True)
class WindowOptions:
    """Options of packing a stream; part of the saved state."""

    seq_length: Count
    #: samples taken in at a time
    window: Count = 1000
    #: windows that a sample waits at most; packs' worth of samples where a window has less
    max_age: NonNegative = 16
    #: samples that wait at most, all together, unless they are in one pack
    max_carried: NonNegative = 1000
    #: load from which a pack waits no longer: tokens as a share of seq_length, or a budget's share
    full_at: Share = 1.0
    seed: NonNegative = 0
    #: a name in STRATEGIES, and its options
    strategy: str = "auto"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    #: further limits per pack: vision patches, images, …
    budgets: Mapping[str, Count] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        check_known("strategy", self.strategy, STRATEGIES)
        check_options(self.strategy, self.strategy_options)
        if self.budgets and (lacks := lacks_limits(self.strategy)):
            raise ValueError(f"strategy {self.strategy!r} cannot keep budgets: {lacks}")


@Kernel
def _packs_worth(amounts: np.ndarray, ids: np.ndarray, limits: np.ndarray) -> float:
    """Return the largest share of a limit that these samples take; ``amounts`` int64 (num_samples,
    num_limits)."""
    worth = 0.0
    for limit in range(limits.shape[0]):
        total = 0
        for sample in ids:
            total += amounts[sample, limit]
        worth = max(worth, total / limits[limit])
    return worth


@Kernel
def _choose_ready(
    packs: Packs,
    amounts: np.ndarray,
    limits: np.ndarray,
    full_at: float,
    num_due: int,
    max_carried: int,
    state: np.ndarray,
) -> np.ndarray:
    """Choose the packs that wait no longer, int64, in random order."""
    num_packs = packs.pack_offsets.shape[0] - 1
    load = np.empty(num_packs)
    is_ready = np.zeros(num_packs, np.bool_)
    for pack in range(num_packs):
        ids = packs.sample_ids[packs.pack_offsets[pack] : packs.pack_offsets[pack + 1]]
        load[pack] = _packs_worth(amounts, ids, limits)
        is_ready[pack] = load[pack] >= full_at or ids.min() < num_due
    if packs.sample_ids.shape[0] > max_carried:
        emptiest_first = np.argsort(-load, kind="mergesort")[::-1]
        carried = 0
        for pack in emptiest_first:
            carried += packs.pack_offsets[pack + 1] - packs.pack_offsets[pack]
            # The emptiest may need more samples than may wait beside it.
            is_ready[pack] |= carried > max_carried and pack != emptiest_first[0]
    ready = np.flatnonzero(is_ready)
    shuffle_between(ready, np.array([0, ready.shape[0]]), state)
    return ready


def ready_packs(
    options: WindowOptions, arrival: np.ndarray, amounts: np.ndarray, num_seen: int, *, last: bool
) -> Packs:
    """Compose packs of all waiting samples; return the ready ones, all if it is the last time.

    ``arrival``, int64 (num_waiting,): the windows in which the samples came, ascending;
    ``amounts``, int64 (num_waiting, 1 + num_budgets): their tokens, and what they take of each
    budget; ``num_seen``: the samples of the stream so far.
    """
    if not len(arrival):
        return join_packs([])
    window = (num_seen - 1) // options.window
    limits = np.array([options.seq_length, *options.budgets.values()])
    first_new = int(np.searchsorted(arrival, window))
    # In packs, where a window has fewer than one
    everything = np.arange(len(arrival))
    waited = (window - arrival) * min(1.0, _packs_worth(amounts, everything[first_new:], limits))
    num_due = 0 if last else int(np.count_nonzero(waited >= options.max_age))
    if not (last or num_due) and _packs_worth(amounts, everything, limits) < options.full_at:
        return join_packs([])
    seed, num_new = options.seed + window, len(arrival) - first_new
    if options.strategy == "auto" and not options.budgets:
        lengths = amounts[:, 0].copy()
        packs = _fewest_packs(lengths, num_due, options.seq_length, num_new, seed, last=last)
    else:
        strategy = STRATEGIES[options.strategy]
        packs = strategy(amounts, limits, seed=seed, **options.strategy_options)
    packs = Packs(packs.sample_ids.astype(np.int64, copy=False), packs.pack_offsets)
    full_at, most = (0.0, 0) if last else (float(options.full_at), options.max_carried)
    state = np.array([(options.seed ^ window << 32) % 2**64], np.uint64)
    ready = _choose_ready(packs, amounts, limits, full_at, num_due, most, state)
    return reorder_packs(packs, ready)


def _fewest_packs(
    lengths: np.ndarray, num_due: int, seq_length: int, num_new: int, seed: int, *, last: bool
) -> Packs:
    """Pack waiting samples, of which the oldest ``num_due`` have to be given out. Further methods
    are tried above the bound only, and only at the end, or if new samples pay for it."""
    best = subset_fill(lengths, num_due, seq_length, num_new)
    others: list[Callable[..., Packs]] = [pack_window] if last or num_new >= _WORTH_A_PLAN else []
    if last:
        others.insert(0, STRATEGIES["best_fit_decreasing"])

    def cost(packs: Packs) -> tuple[int, int]:
        return packs.num_packs, -int(np.count_nonzero(packs.sums(lengths) == seq_length))

    for other in others:
        if (best.num_packs - 1) * seq_length >= lengths.sum():
            best = min(best, other(lengths, seq_length, seed=seed), key=cost)
    return best
