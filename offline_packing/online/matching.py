"""Pools that choose as the packers of other projects do: item by item in, packs out.

They have the methods of `PackingPool`, and take the place of it where a run must give the same
packs as one with ms-swift or VeOmni.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from offline_packing.planner.strategies.strategy import Packs
from task_encoders.samples import SampleError

Item = TypeVar("Item")
#: (lengths int64 (n,), number of the window) -> packs of them
Match = Callable[[np.ndarray, int], Packs]


class Pool(Protocol[Item]):
    """Interface of `PackingPool` and the pools below."""

    @property
    def waiting(self) -> list[Item]:
        """Items in no pack yet."""

    def add(self, item: Item, num_tokens: int) -> list[list[Item]]:
        """Take in an item; the packs that became ready. Raises SampleError if it fits none."""

    def finish(self) -> list[list[Item]]:
        """All items that still wait, in packs."""

    def state(self) -> dict[str, Any]:
        """State besides the waiting items: everything that later packs depend on."""


class _Waiting(Generic[Item]):
    """Items with their lengths; what the pools below share."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._items: list[tuple[Item, int]] = []

    @property
    def waiting(self) -> list[Item]:
        """Items in no pack yet; their order decides what comes out."""
        return [item for item, _ in self._items]

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {"num_tokens": [num_tokens for _, num_tokens in self._items]}

    def restore(self, state: Mapping[str, Any], items: Iterable[Item]) -> None:
        """Continue where :meth:`state` was taken, while ``items`` waited."""
        self._items = list(zip(items, state["num_tokens"], strict=True))

    def _take_in(self, item: Item, num_tokens: int) -> None:
        check_fits(num_tokens, self._max_tokens)
        self._items.append((item, num_tokens))


class MatchedWindows(_Waiting[Item]):
    """Takes ``window`` items at a time and packs them with what was left of the window before.

    ``holds_last``: the last pack of a window waits and takes part in the next one, as in ms-swift;
    otherwise nothing is carried over, as in a loop that empties its buffer.
    """

    def __init__(self, match: Match, max_tokens: int, *, window: int, holds_last: bool) -> None:
        super().__init__(max_tokens)
        self._match = match
        self._window = window
        self._holds_last = holds_last
        self._num_added = 0

    def add(self, item: Item, num_tokens: int) -> list[list[Item]]:
        """See Pool."""
        self._take_in(item, num_tokens)
        self._num_added += 1
        return [] if self._num_added % self._window else self._pack(holds_last=self._holds_last)

    def finish(self) -> list[list[Item]]:
        """See Pool."""
        return self._pack(holds_last=False)

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return super().state() | {"num_added": self._num_added}

    def restore(self, state: Mapping[str, Any], items: Iterable[Item]) -> None:
        """See _Waiting."""
        super().restore(state, items)
        self._num_added = state["num_added"]

    def _pack(self, *, holds_last: bool) -> list[list[Item]]:
        lengths = np.array([num_tokens for _, num_tokens in self._items], np.int64)
        packs = self._match(lengths, -(-self._num_added // self._window))
        parts = np.split(packs.sample_ids, packs.pack_offsets[1:-1])
        chosen = [[self._items[i] for i in part] for part in parts if len(part)]
        self._items = chosen.pop() if holds_last and chosen else []
        return [[item for item, _ in pack] for pack in chosen]


class TokenBudget(_Waiting[Item]):
    """Dynamic batches: waits for ``buffer_size`` items and ``max_tokens`` tokens, then takes from
    the oldest on whatever still fits. The rule of VeOmni's `DynamicBatchingSizeDataset`."""

    def __init__(self, max_tokens: int, buffer_size: int) -> None:
        super().__init__(max_tokens)
        self._buffer_size = buffer_size
        self._num_tokens = 0

    def add(self, item: Item, num_tokens: int) -> list[list[Item]]:
        """See Pool."""
        self._take_in(item, num_tokens)
        self._num_tokens += num_tokens
        ready = len(self._items) >= self._buffer_size and self._num_tokens >= self._max_tokens
        return [self.take()] if ready else []

    def finish(self) -> list[list[Item]]:
        """See Pool."""
        packs = []
        while self._items:
            packs.append(self.take())
        return packs

    def restore(self, state: Mapping[str, Any], items: Iterable[Item]) -> None:
        """See _Waiting."""
        super().restore(state, items)
        self._num_tokens = sum(state["num_tokens"])

    def take(self) -> list[Item]:
        """The next pack of the waiting items, of which there must be one."""
        room = self._max_tokens
        pack, rest = [], []
        for item, num_tokens in self._items:
            if num_tokens <= room:
                room -= num_tokens
                pack.append(item)
            else:
                rest.append((item, num_tokens))
        self._items = rest
        self._num_tokens -= self._max_tokens - room
        return pack


class FixedCount(_Waiting[Item]):
    """``count`` items at a time, in their order; the last pack may have fewer."""

    def __init__(self, max_tokens: int, count: int) -> None:
        super().__init__(max_tokens)
        self._count = count

    def add(self, item: Item, num_tokens: int) -> list[list[Item]]:
        """See Pool."""
        self._take_in(item, num_tokens)
        return self.finish() if len(self._items) == self._count else []

    def finish(self) -> list[list[Item]]:
        """See Pool."""
        pack, self._items = self.waiting, []
        return [pack] if pack else []


def check_fits(num_tokens: int, max_tokens: int) -> None:
    """Raise SampleError for a sample that fits no pack of ``max_tokens``."""
    if num_tokens < 1:
        raise SampleError("bad_record", "a sample without tokens")
    if num_tokens > max_tokens:
        raise SampleError("overlong", f"{num_tokens} tokens, a pack holds {max_tokens}")
