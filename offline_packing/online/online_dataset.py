"""Packing inside a PyTorch loader: what `PackedIterableDataset` and `DynamicBatches` share.

Each reader (a loader process of a rank) packs its own part of the samples. A sample that cannot be
used is set aside with its reason, logged and counted. The state that torchdata's
StatefulDataLoader saves names samples by number; their contents are read again.
"""

import logging
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from offline_packing.errors import StageError
from offline_packing.online.matching import Pool
from offline_packing.online.reading import (
    Load,
    Sample,
    Shard,
    has_indices,
    open_source,
    read_sample,
)
from task_encoders.samples import REASONS, SampleError

logger = logging.getLogger(__name__)

#: Samples in a row that may fail to be read before the run ends, as in Energon.
MAX_FAILURES_IN_A_ROW: Final = 100
_REASON_NAMES: Final = tuple(REASONS)
_COUNTED_READERS: Final = 256


class OnlineDataset(IterableDataset[Any]):
    """Packs the samples of a dataset while they are read.

    Args:
        dataset: map-style, or iterable. A map-style one is split among ranks and workers by index.
        encode: applied to a reader's own samples; what it raises sets the sample aside.
        split: for an iterable dataset: False if it gives each rank and worker its own part itself.
        lengths: tokens of each sample of a map-style dataset, if they are known: samples are then
            read when their pack is made, and none wait in memory or are read again on resuming.
        shuffle: read a map-style dataset in an order of `seed` and the epoch (see `set_epoch`).
        rank, world_size: default: those of torch.distributed when the loader starts.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        encode: Callable[[Any], Any] | None = None,
        split: bool = True,
        lengths: Sequence[int] | np.ndarray | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        if (rank is None) != (world_size is None):
            raise ValueError("rank and world_size go together; give both or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, not in 0..world_size - 1 = {world_size - 1}")
        self.dataset = dataset
        if shuffle and not has_indices(dataset):
            raise ValueError("shuffle needs a dataset with indices; shuffle the stream itself")
        if lengths is not None and (not has_indices(dataset) or len(lengths) != len(dataset)):
            raise ValueError(
                f"{len(lengths)} lengths: give one for each sample of a dataset with indices"
            )
        self.lengths = lengths
        self.encode = encode
        self.split = split
        self.shuffle = shuffle
        self.seed = seed
        self._ranks = None if rank is None else (rank, world_size)
        self._pass: _Pass | None = None
        self._saved: Mapping[str, Any] | None = None
        #: by reader and reason; in shared memory, so that the trainer sees what its workers count
        self._counts = torch.zeros(_COUNTED_READERS, len(REASONS), dtype=torch.int64)
        #: shared as well, for workers that live longer than an epoch
        self._epoch = torch.zeros((), dtype=torch.int64)
        for tensor in (self._counts, self._epoch):
            tensor.share_memory_()

    @abstractmethod
    def make_pool(self, saved: tuple[Mapping[str, Any], list[Any]] | None) -> Pool[Any]:
        """The pool that packs, new, or as it was when (its state, the items that waited) were."""

    @abstractmethod
    def collate(self, samples: list[Any]) -> Any:
        """A pack as it is given out."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What decides the packs: a state goes only with the same settings."""

    @property
    def set_aside(self) -> Counter[str]:
        """Samples that could not be used, by reason, over all workers of this rank."""
        totals = self._counts.sum(dim=0).tolist()
        return +Counter(dict(zip(_REASON_NAMES, totals, strict=True)))

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the passes that begin from now on: another order if samples are shuffled;
        the dataset's own `set_epoch` is called when they begin."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        self._pass = _Pass(self, self._shard(), saved)
        return self._pass

    def state_dict(self) -> dict[str, Any]:
        """Where this reader is; plain values and arrays, no samples."""
        if self._pass is None or self._saved is not None:
            return dict(self._saved or {"epoch": int(self._epoch)})
        return self._pass.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the next pass where `state` was taken. Raises StageError, when the pass
        begins, if the settings or the readers are others."""
        self._saved = state
        self.set_epoch(state["epoch"])

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned worker, which is in no process group."""
        return self.__dict__ | {"_ranks": self._rank_and_size(), "_pass": None}

    def _rank_and_size(self) -> Any:
        if self._ranks is None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return self._ranks

    def _shard(self) -> Shard:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        rank, world_size = self._rank_and_size() or (0, 1)
        return Shard(rank, world_size, worker, num_workers)


class _Pass:
    """One reader's pass over its samples: an iterator over packs."""

    def __init__(self, owner: OnlineDataset, shard: Shard, saved: Mapping[str, Any] | None) -> None:
        self._owner = owner
        self._counts = owner._counts[shard.index % _COUNTED_READERS]
        self._is_alone = shard.count == 1
        order = {"shuffle": owner.shuffle, "seed": owner.seed}
        self._made_with = owner.settings() | order | vars(shard)
        self._epoch = int(saved["epoch"] if saved else owner._epoch)
        self._source = open_source(
            owner.dataset,
            shard,
            epoch=self._epoch,
            shuffle_seed=owner.seed if owner.shuffle else None,
            split=owner.split,
            mark_every=owner.settings()["buffer_size"],
        )
        self._ready: deque[list[Sample]] = deque()
        #: samples that were packed; that could not be read since the last that could
        self._num_packed = self._failures = 0
        self._last_error: SampleError | None = None
        self._ended = False
        if saved and "source" in saved:
            self._restore(saved)
        else:
            self._pool = owner.make_pool(None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            while not self._ready and not self._ended:
                self._read_one()
            if not self._ready:
                raise StopIteration
            if contents := self._contents(self._ready.popleft()):
                return self._owner.collate(contents)

    def _contents(self, pack: list[Sample]) -> list[Any]:
        """The samples of a pack, but for those that prove not to be usable when they are read."""
        if self._owner.lengths is None:
            return [sample.content for sample in pack]
        contents = []
        for number, num_tokens, load in pack:
            try:
                _, found, content = self._read(number, load)
                if found != num_tokens:
                    detail = f"{found} tokens, and its length was given as {num_tokens}"
                    raise SampleError("bad_record", detail)
                contents.append(content)
            except SampleError as error:
                self._set_aside(number, error)
        return contents

    def state(self) -> dict[str, Any]:
        ready = [[[s.number, s.num_tokens] for s in pack] for pack in self._ready]
        waiting = [[s.number, s.num_tokens] for s in self._pool.waiting]
        oldest = min((number for pack in [*ready, waiting] for number, _ in pack), default=None)
        return {
            "epoch": self._epoch,
            "made_with": dict(self._made_with),
            "ready": ready,
            "waiting": waiting,
            "pool": self._pool.state(),
            "ended": self._ended,
            "num_packed": self._num_packed,
            "set_aside": self._counts.tolist(),
            "source": self._source.state(oldest),
        }

    def _restore(self, saved: Mapping[str, Any]) -> None:
        for name, now in self._made_with.items():
            if (then := saved["made_with"].get(name)) != now:
                raise StageError(
                    f"the saved state is of {name} {then!r}, and now it is {now!r}; resume with "
                    "the same settings"
                )
        self._counts.copy_(torch.tensor(saved["set_aside"]))
        wanted = dict(pair for pack in [*saved["ready"], saved["waiting"]] for pair in pack)
        found = {}
        self._ended, self._num_packed = saved["ended"], saved["num_packed"]
        if wanted or not self._ended:
            loads = self._source.restore(saved["source"], wanted.keys())
            found = {number: self._read_again(number, wanted[number], loads) for number in wanted}
        self._ready.extend([found[number] for number, _ in pack] for pack in saved["ready"])
        waiting = [found[number] for number, _ in saved["waiting"]]
        self._pool = self._owner.make_pool((saved["pool"], waiting))

    def _read_again(self, number: int, num_tokens: int, loads: Mapping[int, Load]) -> Sample:
        if self._owner.lengths is not None:
            return Sample(number, num_tokens, loads[number])
        try:
            sample = read_sample(number, loads[number], self._owner.encode)
        except SampleError as error:
            raise StageError(f"sample {number} was readable before the restart: {error}") from error
        if sample.num_tokens != num_tokens:
            raise StageError(
                f"sample {number} has {sample.num_tokens} tokens, and had {num_tokens} before the "
                "restart; encode the same sample in the same way every time"
            )
        return sample

    def _read_one(self) -> None:
        found = self._source.next()
        if found is None:
            self._end()
            return
        number, load = found
        lengths = self._owner.lengths
        try:
            if lengths is None:
                sample = self._read(number, load)
            else:
                sample = Sample(number, int(lengths[number]), load)
            self._ready.extend(self._pool.add(sample, sample.num_tokens))
            self._num_packed += 1
        except SampleError as error:
            self._set_aside(number, error)

    def _read(self, number: int, load: Load) -> Sample:
        try:
            sample = read_sample(number, load, self._owner.encode)
        except SampleError:
            self._failures += 1
            raise
        self._failures = 0
        return sample

    def _end(self) -> None:
        self._ended = True
        self._ready.extend(self._pool.finish())
        # One of many readers may have had only a few samples.
        if self._is_alone and self._last_error is not None and not self._num_packed:
            raise StageError(
                f"no sample can be used, the last one because of {self._last_error}; check the "
                "dataset, and the length of packs"
            )

    def _set_aside(self, number: int, error: SampleError) -> None:
        logger.warning("set aside sample %d: %s", number, error)
        self._last_error = error
        self._counts[_REASON_NAMES.index(error.reason)] += 1
        if self._failures == MAX_FAILURES_IN_A_ROW:
            raise StageError(
                f"{self._failures} samples in a row cannot be read, the last one, {number}, with "
                f"{error}; check the dataset"
            ) from error
