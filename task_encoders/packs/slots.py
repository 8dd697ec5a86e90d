"""Packs that go over 1, 2, 4 … ranks, and slots of packs that are trained at the same time.

    slot 0   pack 0 over ranks 0 to 3, pack 1 over 4 and 5, packs 2 and 3 over 6 and 7
    slot 1   pack 4 over all

A pack over cp ranks holds up to cp * tokens_per_rank tokens, each sample padded to what cp ranks
can cut (`cut_multiple`). The sizes of a slot's packs add up to all ranks. A pack over n ranks
begins at a rank that is a multiple of n, so that n ranks from there, a group that is made once,
share it.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from task_encoders.field_types import Count, check_fields
from task_encoders.packs.pack_format import cut_multiple


@dataclass(frozen=True)
class ContextParallel:
    """Ranks that train a slot together, and the tokens of a pack that each has room for."""

    #: a power of two
    ranks: Count
    tokens_per_rank: Count

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ranks & (self.ranks - 1):
            raise ValueError(
                f"ranks is {self.ranks}; packs go over 1, 2, 4 … ranks: take a power of two, the "
                "ranks of several such groups read several slots at a time"
            )

    def check(self, seq_length: int, multiple: int) -> None:
        """Raise ValueError for a longest pack that the ranks cannot hold or cut."""
        if seq_length > self.ranks * self.tokens_per_rank:
            raise ValueError(
                f"seq_length {seq_length} > {self.ranks} ranks x {self.tokens_per_rank} tokens per "
                "rank, the longest pack under context_parallel; lower it, or raise these"
            )
        for name, value, unit in (
            ("tokens_per_rank", self.tokens_per_rank, cut_multiple(1, multiple)),
            ("seq_length", seq_length, cut_multiple(self.ranks, multiple)),
        ):
            if value % unit:
                raise ValueError(
                    f"{name} {value} is not a multiple of {unit}, which context_parallel needs to "
                    f"cut packs for up to {self.ranks} ranks; take {max(value // unit, 1) * unit}"
                )

    def room(self, num_ranks: Any, seq_length: int) -> Any:
        """Tokens that a pack over `num_ranks` may hold; of several packs, an array."""
        return np.minimum(num_ranks * self.tokens_per_rank, seq_length)

    def capacities(self, seq_length: int) -> np.ndarray:
        """Tokens that a pack over 1, 2, 4 … ranks may hold: int64 (num_sizes,)."""
        return np.asarray(self.room(1 << np.arange(self.ranks.bit_length()), seq_length))


@dataclass(frozen=True, eq=False)
class Slots:
    """Packs in slots, by the ranks that each pack goes over."""

    over: ContextParallel
    #: integers (num_packs,)
    cp_sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """Offsets of the slots: cp_sizes [4, 2, 2, 8] over 8 ranks -> [0, 3, 4]. Raises ValueError
        if they do not add up to slots."""
        ends = np.cumsum(self.cp_sizes, dtype=np.int64)
        offsets = np.append(0, np.flatnonzero(ends % self.over.ranks == 0) + 1)
        full = np.arange(1, len(offsets)) * self.over.ranks
        if offsets[-1] != len(ends) or not np.array_equal(ends[offsets[1:] - 1], full):
            raise ValueError(
                f"the ranks of packs do not add up to slots of {self.over.ranks} ranks"
            )
        return offsets

    @functools.cached_property
    def begins(self) -> np.ndarray:
        """int64 (num_packs,): ranks of all packs before, which are the slot's number times its
        ranks, plus the pack's first rank."""
        return np.cumsum(self.cp_sizes, dtype=np.int64) - self.cp_sizes

    @property
    def packs_by_size(self) -> dict[str, int]:
        """Number of packs over 1, 2, 4 … ranks."""
        sizes, counts = np.unique(self.cp_sizes, return_counts=True)
        return dict(zip(map(str, sizes), counts.tolist(), strict=True))

    def idle_share(self, cost: np.ndarray) -> float:
        """Share of time that ranks wait for the costliest pack per rank of their slot. `cost`
        (num_packs,) of whole packs; communication is not counted."""
        if not len(cost):
            return 0.0
        slowest = np.maximum.reduceat(cost / self.cp_sizes, self.offsets[:-1])
        return float(1 - cost.sum() / (slowest.sum() * self.over.ranks)) if slowest.any() else 0.0


def slot_figures(slots: Slots | None, cost: np.ndarray | None) -> dict[str, Any]:
    """Figures of a plan: of its slots, if it has any, and their idle time, if the cost of its packs
    is given. `slot_rows` prints them."""
    if slots is None:
        names = ("slots", "packs_by_cp_size", "context_parallel", "idle_in_slots")
        return dict.fromkeys(names)
    return {
        "slots": len(slots),
        "packs_by_cp_size": slots.packs_by_size,
        "context_parallel": asdict(slots.over),
        "idle_in_slots": None if cost is None else slots.idle_share(cost),
    }


def slot_rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines of a summary, from `slot_figures`."""
    if figures["slots"] is None:
        return
    room = "{ranks} ranks x {tokens_per_rank:,} tokens".format_map(figures["context_parallel"])
    yield "slots", f"{figures['slots']:,} of {room}"
    sizes = (f"{count:,} over {size}" for size, count in figures["packs_by_cp_size"].items())
    yield "packs over ranks", ", ".join(sizes)
    if (idle := figures["idle_in_slots"]) is not None:
        yield "idle in slots", f"{idle:.2%}, by operations; communication is not counted"
