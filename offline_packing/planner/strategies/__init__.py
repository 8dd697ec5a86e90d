"""Packing strategies: pure functions from lengths to packs, found by name in STRATEGIES.

Two kinds share one registry. A *composer* decides on the histogram of lengths which multisets fill
the packs, and leaves open which sample of a length is used (COMPOSERS); the others name the samples
themselves. To add a strategy, write its function, with the options that it understands, and add one
line here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from offline_packing.planner.strategies.auto import auto, mixed
from offline_packing.planner.strategies.budgets import pack_budgets
from offline_packing.planner.strategies.composition import Composer, by_histogram
from offline_packing.planner.strategies.longest_first import best_fit_decreasing
from offline_packing.planner.strategies.peers.hash_bucket import hash_bucket
from offline_packing.planner.strategies.peers.placing import (
    first_fit_decreasing,
    first_fit_shuffle,
    knapsack,
    sequential,
    shuffle_and_pack,
    to_constant_volume,
)
from offline_packing.planner.strategies.strategy import Strategy

COMPOSERS: dict[str, Composer] = {
    "auto": auto,
    "mixed": mixed,
    "best_fit_decreasing": best_fit_decreasing,
}


STRATEGIES: dict[str, Strategy] = {
    "auto": by_histogram(auto, pack_budgets),
    "mixed": by_histogram(mixed),
    "best_fit_decreasing": by_histogram(best_fit_decreasing),
    "hash_bucket": hash_bucket,
    "first_fit_decreasing": first_fit_decreasing,
    "first_fit_shuffle": first_fit_shuffle,
    "shuffle_and_pack": shuffle_and_pack,
    "to_constant_volume": to_constant_volume,
    "sequential": sequential,
    "knapsack": knapsack,
}


def check_options(strategy: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that a strategy lacks, or values that it does not take."""
    valid = STRATEGIES[strategy].options.model_fields
    unknown = sorted(set(options) - set(valid))
    if unknown:
        takes = f"valid: {', '.join(valid)}" if valid else "it has none; leave them out"
        raise ValueError(f"strategy {strategy!r} has no option {unknown[0]!r}; {takes}")
    STRATEGIES[strategy].options(**options)


def lacks_limits(strategy: str) -> str:
    """Say why a strategy cannot honour limits besides seq_length; "" if it can."""
    if not STRATEGIES[strategy].lengths_only:
        return ""
    able = ", ".join(name for name, other in STRATEGIES.items() if not other.lengths_only)
    return f"it decides on the histogram of lengths; choose one of {able}"


def describe_options() -> Iterator[tuple[str, str, str, str]]:
    """Yield (strategy, option, default, meaning) of all options that a configuration may set."""
    for name, strategy in STRATEGIES.items():
        for option, field in strategy.options.model_fields.items():
            default = "" if field.default is None else str(field.default)
            if not isinstance(field.default, int | float | str | None):
                default = "built in"
            yield name, option, default, field.description or ""
