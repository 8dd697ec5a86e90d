"""Packing a stream of samples in windows, for online use and for datasets larger than memory.

Each window takes the next samples into a pool and composes packs from the pool; full packs are
given out, the samples of the others stay for the next window. A sample stays at most ``max_age``
windows, and ``max_carried`` samples at most stay at all: beyond either limit packs go out unfilled.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from offline_packing.planner.order import reorder_packs
from offline_packing.planner.request import check_known
from offline_packing.planner.strategies import STRATEGIES, check_budgets, check_options
from offline_packing.planner.strategies.composition import (
    Composition,
    expand_composition,
    select_patterns,
)
from offline_packing.planner.strategies.histogram import count_lengths
from offline_packing.planner.strategies.narrow_fill import fills_by_fitness
from offline_packing.planner.strategies.strategy import (
    Packs,
    check_amounts,
    check_lengths,
    join_packs,
)
from task_encoders.field_types import Count, NonNegative, Number, check_fields


def window_fill(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Exact fills of the few hundred to few thousand samples of a window. Narrow and broad
    distributions have a method each; where it leaves more than 2% of the tokens in unfilled packs,
    the other one is tried too."""
    seq_length = len(counts) - 1

    def full_packs(composition: Composition) -> int:
        return int(composition.multiplicity[composition.pattern_tokens() == seq_length].sum())

    first_method, second_method = fills_by_fitness(counts)
    first = first_method(counts, seed=seed)
    if full_packs(first) * seq_length >= 0.98 * (counts @ np.arange(seq_length + 1)):
        return first
    return max(first, second_method(counts, seed=seed), key=full_packs)


def pack_window(lengths: np.ndarray, seq_length: int, *, seed: int) -> Packs:
    """Packs of the samples of a window, the fullest first, and in them the oldest of a length."""
    lengths = np.ascontiguousarray(lengths, np.int32)
    counts = count_lengths(lengths, seq_length)
    packs = window_fill(counts, seed=seed)
    fullest_first = np.argsort(-packs.pattern_tokens(), kind="stable")
    return expand_composition(select_patterns(packs, fullest_first), lengths, counts)


@dataclass(frozen=True)
class WindowOptions:
    """Options of packing a stream; part of the saved state."""

    seq_length: Count
    #: samples taken in at a time
    window: Count = 1000
    #: windows that a sample waits at most
    max_age: NonNegative = 16
    #: samples that wait at most, all together
    max_carried: NonNegative = 1000
    #: load from which a pack waits no longer: tokens as a share of seq_length, or a budget's share
    full_at: Number = 1.0
    seed: NonNegative = 0
    #: a name in STRATEGIES, and its options
    strategy: str = "auto"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    #: further limits per pack: vision patches, images, …
    budgets: Mapping[str, Count] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.full_at <= 1:
            raise ValueError(f"full_at is {self.full_at}; it is a share of each limit, 0 to 1")
        check_known("strategy", self.strategy, STRATEGIES)
        check_budgets(self.strategy, self.budgets)
        check_options(self.strategy, self.strategy_options)


class WindowPlanner:
    """Packs a stream of lengths; what comes out does not depend on how the stream was cut.

    ::

        planner = WindowPlanner(WindowOptions(seq_length=8192))
        for num_tokens in parts:            # integer arrays (n,), any n
            packs = planner.push(num_tokens)  # packs that became ready, possibly none
        packs = planner.finish()            # the rest
    """

    def __init__(self, options: WindowOptions) -> None:
        self.options = options
        #: int64 (3 + num_budgets, num_waiting), in order of arrival: ids, windows of arrival,
        #: lengths, amounts of each budget
        self._pool = np.zeros((3 + len(options.budgets), 0), np.int64)
        self._num_seen = 0

    @property
    def num_waiting(self) -> int:
        """Samples that are in no pack yet."""
        return self._pool.shape[1]

    def push(
        self,
        num_tokens: np.ndarray,
        sample_ids: np.ndarray | None = None,
        amounts: Mapping[str, np.ndarray] | None = None,
    ) -> Packs:
        """Take in samples, integers (n,) in 1..seq_length, and return the packs that are ready.

        ``sample_ids``, integers (n,), name them in the packs; by default they are counted from 0
        over the whole stream. ``amounts`` has integers (n,) for each budget. Raises ValueError,
        and takes nothing in, for a sample that fits no pack.
        """
        options = self.options
        lengths = check_lengths(num_tokens, options.seq_length, first_sample=self._num_seen)
        arrival = self._num_seen + np.arange(len(lengths))
        ids = arrival if sample_ids is None else np.asarray(sample_ids, np.int64)
        if ids.shape != lengths.shape:
            raise ValueError(f"sample_ids has shape {ids.shape}, num_tokens {lengths.shape}")
        columns = self._checked(amounts or {}, len(lengths))
        arrived = np.stack([ids, arrival // options.window, lengths, *columns])
        ends = np.flatnonzero((arrival + 1) % options.window == 0) + 1
        ready = []
        for part in np.split(arrived, ends, axis=1):
            self._pool = np.concatenate([self._pool, part], axis=1)
            self._num_seen += part.shape[1]
            if part.shape[1] and self._num_seen % options.window == 0:
                ready.append(self._run_window())
        return join_packs(ready)

    def finish(self) -> Packs:
        """All samples that still wait, in packs; the planner is empty afterwards."""
        return self._run_window(last=True)

    def state(self) -> dict[str, Any]:
        """State: everything that later packs depend on, as plain values and arrays."""
        return {
            "options": asdict(self.options),
            "num_seen": self._num_seen,
            "pool": self._pool.copy(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "WindowPlanner":
        """A planner that continues exactly where :meth:`state` was taken."""
        planner = cls(WindowOptions(**state["options"]))
        planner._num_seen = int(state["num_seen"])
        planner._pool = np.array(state["pool"], np.int64)
        return planner

    def _run_window(self, *, last: bool = False) -> Packs:
        """Compose packs of the pool and give out those that are ready, all if it is the last."""
        options = self.options
        if self.num_waiting == 0:
            return join_packs([])
        ids, arrival, *sizes = self._pool
        window = (self._num_seen - 1) // options.window
        packs = self._compose(sizes, seed=options.seed + window)
        limits = np.array([options.seq_length, *options.budgets.values()])
        load = (packs.sums(np.stack(sizes, axis=1)) / limits).max(axis=1)
        starts, counts = packs.pack_offsets[:-1], np.diff(packs.pack_offsets)
        due = arrival[packs.sample_ids] <= window - options.max_age
        emptiest_first = np.argsort(-load, kind="stable")[::-1]
        carried = np.empty_like(counts)  # samples in this pack and in emptier ones
        carried[emptiest_first] = np.cumsum(counts[emptiest_first])
        ready = (
            (load >= options.full_at)
            | np.logical_or.reduceat(due, starts)
            | (carried > options.max_carried)
            | last
        )
        order = np.random.default_rng([options.seed, window]).permutation(np.flatnonzero(ready))
        given_out = reorder_packs(packs, order)
        self._pool = np.delete(self._pool, given_out.sample_ids, axis=1)
        return given_out.of(ids)

    def _checked(self, amounts: Mapping[str, np.ndarray], num_samples: int) -> list[np.ndarray]:
        """Sizes of new samples in each budget: int64 (num_samples,) arrays."""
        columns = []
        for name, limit in self.options.budgets.items():
            if name not in amounts:
                raise ValueError(f"budget {name!r} needs amounts[{name!r}]")
            checked = check_amounts(
                name, amounts[name], limit, num_samples, first_sample=self._num_seen
            )
            columns.append(checked)
        return columns

    def _compose(self, sizes: list[np.ndarray], *, seed: int) -> Packs:
        """Packs of samples of ``sizes``: lengths and amounts of each budget, int64 (n,)."""
        options = self.options
        lengths, *amounts = sizes
        if options.strategy == "auto" and not amounts:
            return pack_window(lengths, options.seq_length, seed=seed)
        limits = options.budgets.items()
        budgets = {name: (n, limit) for n, (name, limit) in zip(amounts, limits, strict=True)}
        strategy, given = STRATEGIES[options.strategy], options.strategy_options
        return strategy(lengths, options.seq_length, seed=seed, budgets=budgets, **given)
