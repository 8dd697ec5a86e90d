"""Samples of a PyTorch dataset: split among readers, and read again on resuming.

A reader is one loader process of one rank. The state of a source never holds samples, only how to
get them again: by number from a dataset with indices, by reading on from a mark in a stream.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from offline_packing.errors import StageError

_MOST_MARKS: Final = 64
#: Reads one sample; a stream has done so already.
Load = Callable[[], Any]


@dataclass(frozen=True)
class Reader:
    """Place of this reader among all. It takes the samples `index`, `index + count`, ..."""

    rank: int
    world_size: int
    worker: int
    num_workers: int

    @property
    def index(self) -> int:
        """Among all readers."""
        return self.worker * self.world_size + self.rank

    @property
    def count(self) -> int:
        """All readers."""
        return self.world_size * self.num_workers


def rank_and_size(given: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return rank and world size as given, or of torch.distributed; None without a process
    group."""
    if given is None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return given


def this_reader(given: tuple[int, int] | None) -> Reader:
    """Return the present process; rank and number of ranks as `rank_and_size` says."""
    info = get_worker_info()
    worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
    rank, world_size = rank_and_size(given) or (0, 1)
    return Reader(rank, world_size, worker, num_workers)


class IndexedSamples:
    """The samples of one reader of a dataset with `__getitem__` and `__len__`, each with its number
    in the dataset; `order`, integers (n,), is the epoch's."""

    def __init__(self, dataset: Any, reader: Reader, order: np.ndarray) -> None:
        if not len(order):
            raise StageError("the dataset is empty; give one with samples")
        self._dataset = dataset
        self._order = order[reader.index :: reader.count]
        self._position = 0

    def next(self) -> tuple[int, Load] | None:
        """Return the next sample; None at the end. Raises StageError if the dataset fails or is
        empty."""
        if self._position == len(self._order):
            return None
        number = int(self._order[self._position])
        self._position += 1
        return number, partial(self._dataset.__getitem__, number)

    def state(self, oldest: int | None) -> dict[str, Any]:
        """Return the plain state that `restore` needs to return samples again, the first of them
        `oldest`."""
        return {"position": self._position}

    def restore(self, state: Mapping[str, Any], numbers: Collection[int]) -> dict[int, Load]:
        """Continue where `state` was taken; return the samples of these numbers again."""
        self._position = state["position"]
        if self._position > len(self._order) or max(numbers, default=0) >= len(self._dataset):
            raise StageError(
                f"the dataset has {len(self._dataset)} samples, and more had been read before the "
                "restart; resume with the same data"
            )
        return {number: partial(self._dataset.__getitem__, number) for number in numbers}


class StreamedSamples:
    """The same for an iterable dataset. With `state_dict` it is read on from a mark, made every
    `mark_every` samples; otherwise from its beginning.

    Args:
        split: every reader sees all samples and keeps its own; otherwise the dataset itself gives
            each reader its part, which may be nothing.
    """

    def __init__(self, dataset: Any, reader: Reader, *, split: bool, mark_every: int) -> None:
        self._dataset = dataset
        self._split = split
        self._keeps = (reader.index, reader.count) if split else (0, 1)
        #: whether an end at once means that the dataset has no samples for anybody
        self._must_give = split or reader.count == 1
        self._length = len(dataset) if split and hasattr(dataset, "__len__") else None
        self._mark_every = mark_every if hasattr(dataset, "state_dict") else 0
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        #: pairs of the number of samples read and the dataset's state then, ascending
        self._marks: list[tuple[int, Any]] = [(0, None)]

    def next(self) -> tuple[int, Load] | None:
        index, count = self._keeps
        found = self._read()
        while found is not None and found[0] % count != index:
            found = self._read()
        return found

    def state(self, oldest: int | None) -> dict[str, Any]:
        first = self._position if oldest is None else oldest
        while len(self._marks) > 1 and self._marks[1][0] <= first:
            del self._marks[0]
        return {"position": self._position, "mark": list(self._marks[0])}

    def restore(self, state: Mapping[str, Any], numbers: Collection[int]) -> dict[int, Load]:
        self._position, mark = state["mark"]
        self._marks = [(self._position, mark)]
        if mark is not None:
            self._dataset.load_state_dict(mark)
        found: dict[int, Load] = {}
        while self._position < state["position"]:
            read = self._read()
            if read is None:
                raise StageError(
                    f"the dataset ended after {self._position} samples, and had "
                    f"{state['position']} when the state was saved; resume with the same data"
                )
            number, load = read
            if number in numbers:
                found[number] = load
        return found

    def _read(self) -> tuple[int, Load] | None:
        number = self._position
        try:
            with _as_only_worker() if self._split else nullcontext():
                if self._iterator is None:
                    self._iterator = iter(self._dataset)
                sample = next(self._iterator)
        except StopIteration:
            if self._position == 0 and self._must_give:
                raise StageError("the dataset is empty; give one with samples") from None
            if self._length is not None and self._position < self._length:
                raise StageError(
                    f"the dataset ended after {self._position} samples, and its length is "
                    f"{self._length}; its source is incomplete"
                ) from None
            return None
        except Exception as error:
            raise StageError(
                f"the dataset failed after {number} samples: {type(error).__name__}: {error}; a "
                "stream cannot go on after an error: pass what may fail as encode="
            ) from error
        self._position += 1
        if self._mark_every and self._position % self._mark_every == 0:
            self._marks.append((self._position, self._dataset.state_dict()))
            if len(self._marks) > _MOST_MARKS:  # nobody asks for a state: fewer of them will do
                del self._marks[1::2]
        return number, lambda: sample


@contextmanager
def _as_only_worker() -> Iterator[None]:
    """Let a dataset that divides itself among a loader's workers (Hugging Face's streams do so
    unasked) give all samples here: a reader that keeps only its share of a part would lose the
    rest."""
    info = torch_worker._worker_info  # torch has no public way to set it
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def has_indices(dataset: Any) -> bool:
    """Tell whether it is map-style. torch's iterable datasets inherit a __getitem__ that only
    raises."""
    is_sized = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return is_sized and not isinstance(dataset, IterableDataset)
