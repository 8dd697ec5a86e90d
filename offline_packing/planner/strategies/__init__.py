"""Packing strategies: pure functions from lengths to packs, found by name in STRATEGIES.

Two kinds share one registry. A *composer* decides on the histogram of lengths which multisets fill
the packs, and leaves open which sample of a length is used (COMPOSERS); the others name the samples
themselves. To add a strategy, write its function and add one line here.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from offline_packing.planner.strategies.auto import auto, mixed, tilted_sampling
from offline_packing.planner.strategies.composition import Composition
from offline_packing.planner.strategies.exact_fill import exact_fill
from offline_packing.planner.strategies.expand import expand_composition
from offline_packing.planner.strategies.histogram import (
    best_fit_decreasing,
    count_lengths,
    greedy_knapsack,
)
from offline_packing.planner.strategies.narrow_fill import narrow_fill
from offline_packing.planner.strategies.packs import Packs
from offline_packing.planner.strategies.pattern_lp import pattern_lp
from offline_packing.planner.strategies.peers import (
    first_fit,
    hash_bucket,
    knapsack,
    sequential,
    volume,
)

#: Strategies count lengths in an array of so many; options are tried on no more.
_TRIED_LENGTH: Final = 1 << 20


class Strategy(Protocol):
    """Packs samples of ``num_tokens`` (integers (num_samples,), all in 1..seq_length)."""

    def __call__(
        self, num_tokens: np.ndarray, seq_length: int, *, seed: int = 0, **options: object
    ) -> Packs:
        """Every sample in exactly one pack, no pack over ``seq_length``."""


#: Decides the packs on ``counts``, int64 (seq_length + 1,): f(counts, *, seed=0, **options).
Composer = Callable[..., Composition]

COMPOSERS: dict[str, Composer] = {
    "auto": auto,
    "best_fit_decreasing": best_fit_decreasing,
    "exact_fill": exact_fill,
    "narrow_fill": narrow_fill,
    "tilted_sampling": tilted_sampling,
    "pattern_lp": pattern_lp,
    "mixed": mixed,
    "greedy_knapsack": greedy_knapsack,
}


def pack_composed(
    composer: Composer,
    num_tokens: np.ndarray,
    seq_length: int,
    *,
    seed: int = 0,
    **options: object,
) -> Packs:
    """Packs of a composer, samples of equal length taken in their order."""
    lengths = np.ascontiguousarray(num_tokens, np.int32)
    counts = count_lengths(lengths, seq_length)
    return expand_composition(composer(counts, seed=seed, **options), lengths, counts)


STRATEGIES: dict[str, Strategy] = {
    **{name: partial(pack_composed, composer) for name, composer in COMPOSERS.items()},
    **hash_bucket.STRATEGIES,
    **first_fit.STRATEGIES,
    **volume.STRATEGIES,
    **sequential.STRATEGIES,
    **knapsack.STRATEGIES,
}


def check_options(strategy: str, seq_length: int, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that a strategy has not, or values that it does not take.

    The values are tried on one sample; arrays with an entry per sample are not for configurations.
    """
    function = COMPOSERS.get(strategy, STRATEGIES[strategy])
    valid = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
        and parameter.name != "seed"
        and "ndarray" not in str(parameter.annotation)
    ]
    unknown = sorted(set(options) - set(valid))
    if unknown:
        takes = f"valid: {', '.join(valid)}" if valid else "it has none; leave them out"
        raise ValueError(f"strategy {strategy!r} has no option {unknown[0]!r}; {takes}")
    if options:
        STRATEGIES[strategy](np.ones(1, np.int32), min(seq_length, _TRIED_LENGTH), **options)
