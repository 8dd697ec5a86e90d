"""Pool of the items that wait for a pack while a stream is packed: the core of online packing."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from offline_packing.planner.strategies.strategy import Packs
from offline_packing.planner.windows import WindowOptions, WindowPlanner
from task_encoders.samples import SampleError

Item = TypeVar("Item")
_NOTHING: Mapping[str, int] = MappingProxyType({})


class PackingPool(Generic[Item]):
    """Takes items of any kind one by one and returns them in packs.

    ::

        pool = PackingPool(WindowOptions(seq_length=8192, budgets={"images": 18}))
        for item in stream:
            for pack in pool.add(item, item.num_tokens, {"images": item.num_images}):
                ...  # a list of items; none at most additions, several at the end of a window
        for pack in pool.finish():
            ...  # the rest
    """

    def __init__(self, options: WindowOptions) -> None:
        self._planner = WindowPlanner(options)
        self._items: dict[int, Item] = {}  # by number of arrival
        self._num_added = 0
        #: sizes of the items that the planner has not seen: it is asked once per window
        self._unseen: list[tuple[int, ...]] = []

    @property
    def options(self) -> WindowOptions:
        """Options of packing the stream."""
        return self._planner.options

    @property
    def waiting(self) -> list[Item]:
        """Items in no pack yet, in order of arrival."""
        return list(self._items.values())

    def add(
        self, item: Item, num_tokens: int, amounts: Mapping[str, int] = _NOTHING
    ) -> list[list[Item]]:
        """Take in an item and return the packs that became ready; ``amounts`` has an entry for
        each budget. Raises SampleError, and does not take it in, if it fits no pack."""
        options = self.options
        if missing := options.budgets.keys() - amounts.keys():
            raise ValueError(f"amounts has no {min(missing)}, which options.budgets limits")
        sizes = (num_tokens, *(amounts[name] for name in options.budgets))
        self._check_fits(sizes)
        self._items[self._num_added] = item
        self._num_added += 1
        self._unseen.append(sizes)
        return self._push() if self._num_added % options.window == 0 else []

    def finish(self) -> list[list[Item]]:
        """All items that still wait, in packs; the pool is empty afterwards."""
        ready = self._push()
        return ready + self._take(self._planner.finish())

    def state(self) -> dict[str, Any]:
        """State besides the :attr:`waiting` items: everything that later packs depend on, as plain
        values and arrays."""
        assert not self._push()  # the window is not full
        numbers = np.fromiter(self._items, np.int64, len(self._items))
        return {"planner": self._planner.state(), "num_added": self._num_added, "items": numbers}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], items: Iterable[Item]) -> "PackingPool[Item]":
        """A pool that continues exactly where :meth:`state` was taken, while ``items`` waited."""
        planner = WindowPlanner.from_state(state["planner"])
        pool = cls(planner.options)
        pool._planner = planner
        pool._num_added = int(state["num_added"])
        pool._items = dict(zip(state["items"].tolist(), items, strict=True))
        return pool

    def _check_fits(self, sizes: tuple[int, ...]) -> None:
        options = self.options
        if not all(isinstance(size, int | np.integer) for size in sizes):
            raise ValueError(f"sizes of an item are {sizes}; they must be integers")
        if sizes[0] < 1:
            raise SampleError("bad_record", "a sample without tokens")
        if sizes[0] > options.seq_length:
            raise SampleError("overlong", f"{sizes[0]} tokens, seq_length is {options.seq_length}")
        for size, (name, limit) in zip(sizes[1:], options.budgets.items(), strict=True):
            if size > limit:
                raise SampleError("over_budget", f"{size} {name}, a pack holds {limit}")

    def _push(self) -> list[list[Item]]:
        names = self.options.budgets
        columns = np.array(self._unseen, np.int64).reshape(-1, 1 + len(names)).T
        self._unseen = []
        amounts = dict(zip(names, columns[1:], strict=True))
        return self._take(self._planner.push(columns[0], amounts=amounts))

    def _take(self, packs: Packs) -> list[list[Item]]:
        """The packs' items, which leave the pool."""
        parts = np.split(packs.sample_ids, packs.pack_offsets[1:-1])
        return [[self._items.pop(i) for i in part.tolist()] for part in parts if len(part)]
