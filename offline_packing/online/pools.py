"""The pool of items that wait for a pack while a stream is packed.

A strategy makes the packs: `WindowOptions` of this package's planner, or a rule of another
framework, to give the same packs as there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from offline_packing.planner.strategies import STRATEGIES
from offline_packing.planner.strategies.strategy import Packs
from offline_packing.planner.windows import WindowOptions, ready_packs
from task_encoders.samples import SampleError

Item = TypeVar("Item")
#: Tokens, and the amount of each budget, of waiting items by their number of arrival.
Sizes = Mapping[int, tuple[int, ...]]
#: Packs of numbers of arrival; and the others, if they go on waiting in another order.
Packed = tuple[Sequence[Sequence[int]], Sequence[int] | None]
NO_AMOUNTS: Final[Mapping[str, int]] = MappingProxyType({})


class Strategy(Protocol):
    """The packs of the waiting items, and when to make them. Stateless."""

    @property
    def seq_length(self) -> int:
        """Tokens that a pack holds."""

    def is_due(self, num_added: int, num_waiting: int, num_tokens: int) -> bool:
        """Tell whether to pack now, given the items read so far, the waiting ones, and their
        tokens."""

    def pack(self, sizes: Sizes, num_added: int, *, last: bool) -> Packed:
        """Pack the waiting items, all of them if the stream has ended."""


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

    def __init__(self, strategy: WindowOptions | Strategy) -> None:
        self._seq_length, self._limits = strategy.seq_length, NO_AMOUNTS
        self._strategy: Strategy | PlannedWindows
        if isinstance(strategy, WindowOptions):
            self._strategy, self._limits = PlannedWindows(strategy), strategy.budgets
        else:
            self._strategy = strategy
        self._items: dict[int, Item] = {}  # by number of arrival; the order decides the packs
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._num_added = self._num_tokens = 0

    @property
    def waiting(self) -> list[Item]:
        """Items in no pack yet."""
        return list(self._items.values())

    def add(
        self, item: Item, num_tokens: int, amounts: Mapping[str, int] = NO_AMOUNTS
    ) -> list[list[Item]]:
        """Take in an item, with the amount of each budget, and return the packs that became ready.
        Raises SampleError, and does not take it in, if it fits no pack."""
        sizes: tuple[int, ...] = (num_tokens,)
        if self._limits:
            if missing := self._limits.keys() - amounts.keys():
                raise ValueError(f"amounts has no {min(missing)}, which options.budgets limits")
            sizes += tuple([amounts[name] for name in self._limits])
        for size in sizes:
            if not isinstance(size, int | np.integer):
                raise ValueError(f"sizes of an item are {sizes}; they must be integers")
        if num_tokens < 1:
            raise SampleError("bad_record", "a sample without tokens")
        if num_tokens > self._seq_length:
            raise SampleError("overlong", f"{num_tokens} tokens, a pack holds {self._seq_length}")
        for size, (name, limit) in zip(sizes[1:], self._limits.items(), strict=True):
            if size > limit:
                raise SampleError("over_budget", f"{size} {name}, a pack holds {limit}")
        self._items[self._num_added], self._sizes[self._num_added] = item, sizes
        self._num_added += 1
        self._num_tokens += num_tokens
        waiting = len(self._items), self._num_tokens
        return self._take() if self._strategy.is_due(self._num_added, *waiting) else []

    def finish(self) -> list[list[Item]]:
        """Pack all items that still wait; the pool is empty afterwards."""
        return self._take(last=True) if self._items else []

    def state(self) -> dict[str, Any]:
        """Return the state without the waiting items: plain values and arrays."""
        numbers = np.fromiter(self._items, np.int64, len(self._items))
        sizes = np.array(list(self._sizes.values()), np.int64)
        return {"num_added": self._num_added, "numbers": numbers, "sizes": sizes}

    def restore(self, state: Mapping[str, Any], items: Iterable[Item]) -> None:
        """Continue exactly where `state` was taken, while `items` waited."""
        numbers, sizes = state["numbers"].tolist(), state["sizes"].tolist()
        self._num_added = int(state["num_added"])
        self._items = dict(zip(numbers, items, strict=True))
        self._sizes = dict(zip(numbers, map(tuple, sizes), strict=True))
        self._num_tokens = sum(size[0] for size in self._sizes.values())

    def _take(self, *, last: bool = False) -> list[list[Item]]:
        packs, order = self._strategy.pack(self._sizes, self._num_added, last=last)
        for number in chain.from_iterable(packs):
            self._num_tokens -= self._sizes.pop(number)[0]
        found = [[self._items.pop(number) for number in pack] for pack in packs if pack]
        if order is not None:
            self._items = {number: self._items[number] for number in order}
            self._sizes = {number: self._sizes[number] for number in order}
        return found


@dataclass(frozen=True)
class PlannedWindows:
    """The planner's packs of windows; samples that fill none wait, as `WindowOptions` say."""

    options: WindowOptions

    def is_due(self, num_added: int, num_waiting: int, num_tokens: int) -> bool:
        return num_added % self.options.window == 0

    def pack(self, sizes: Sizes, num_added: int, *, last: bool) -> Packed:
        numbers = np.fromiter(sizes, np.int64, len(sizes))
        amounts = np.fromiter(chain.from_iterable(sizes.values()), np.int64)
        amounts = amounts.reshape(len(sizes), -1)
        arrival = numbers // self.options.window
        return _lists(
            ready_packs(self.options, arrival, amounts, num_added, last=last), numbers
        ), None


@dataclass(frozen=True)
class MatchedWindows:
    """Packs ``window`` items at a time with the items left of the window before.

    ``holds_last``: the last pack of a window joins the next window, as in ms-swift; otherwise no
    item is carried over, as in a loop that empties its buffer.
    """

    seq_length: int
    strategy: str
    window: int
    seed: int
    holds_last: bool

    def is_due(self, num_added: int, num_waiting: int, num_tokens: int) -> bool:
        return num_added % self.window == 0

    def pack(self, sizes: Sizes, num_added: int, *, last: bool) -> Packed:
        lengths = np.array([num_tokens for (num_tokens,) in sizes.values()], np.int64)
        seed = self.seed + -(-num_added // self.window)
        packs = STRATEGIES[self.strategy](lengths, self.seq_length, seed=seed)
        found = _lists(packs, np.fromiter(sizes, np.int64, len(sizes)))
        return found, found.pop() if self.holds_last and not last else None


@dataclass(frozen=True)
class TokenBudget:
    """Dynamic batches: waits for ``buffer_size`` items and ``seq_length`` tokens, then takes all
    that fit, from the oldest on. The rule of VeOmni's `DynamicBatchingSizeDataset`."""

    seq_length: int
    buffer_size: int

    def is_due(self, num_added: int, num_waiting: int, num_tokens: int) -> bool:
        return num_waiting >= self.buffer_size and num_tokens >= self.seq_length

    def pack(self, sizes: Sizes, num_added: int, *, last: bool) -> Packed:
        packs: list[list[int]] = []
        waiting = list(sizes.items())
        while waiting and (last or not packs):
            room, pack, rest = self.seq_length, [], []
            for one in waiting:
                number, (num_tokens,) = one
                if num_tokens <= room:
                    room -= num_tokens
                    pack.append(number)
                else:
                    rest.append(one)
            packs.append(pack)
            waiting = rest
        return packs, None


@dataclass(frozen=True)
class FixedCount:
    """``count`` items at a time, in their order; the last pack may have fewer."""

    seq_length: int
    count: int

    def is_due(self, num_added: int, num_waiting: int, num_tokens: int) -> bool:
        return num_waiting == self.count

    def pack(self, sizes: Sizes, num_added: int, *, last: bool) -> Packed:
        return [list(sizes)], None


def _lists(packs: Packs, numbers: np.ndarray) -> list[list[int]]:
    """Return the numbers of the samples of each pack."""
    ids, offsets = numbers[packs.sample_ids].tolist(), packs.pack_offsets.tolist()
    return [ids[start:end] for start, end in pairwise(offsets)]
