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
from torch.utils.data import IterableDataset

from offline_packing.errors import StageError
from offline_packing.online.pools import Pool
from offline_packing.online.reading import (
    Load,
    Reader,
    Sample,
    check_ranks,
    has_indices,
    open_source,
    rank_and_size,
    read_again,
    read_sample,
    this_reader,
)
from offline_packing.online.unusable import Unusable, by_reason, shared_counts
from offline_packing.planner.samples import checked_sizes
from task_encoders.field_types import Count, NonNegative, checked
from task_encoders.samples import SampleError

logger = logging.getLogger(__name__)

_UNEQUAL: Final = (
    "each of %d ranks packs its own samples and may have more packs than another; one that ends "
    "early leaves the others waiting: set repeat=True, and count steps. Where one loader's packs "
    "are dealt to all ranks (accelerate, ms-swift), set rank=0, world_size=1"
)


class OnlineDataset(IterableDataset[Any]):
    """Packs the samples of a dataset while they are read.

    Args:
        dataset: map-style, or iterable. A map-style one is split among ranks and workers by index.
        encode: applied to a reader's own samples; what it raises sets the sample aside.
        split: for an iterable dataset: False if it gives each rank and worker its own part itself.
        lengths: tokens of each sample of a map-style dataset, if they are known: samples are then
            read when their pack is made, and none wait in memory or are read again on resuming.
        shuffle: read a map-style dataset in an order of `seed` and the epoch (see `set_epoch`).
        repeat: begin the next epoch at the end of one, without end. Ranks make unequal numbers of
            packs of an epoch; this way each takes as many steps as the trainer counts.
        rank, world_size: default: those of torch.distributed when the loader starts. 0 and 1 where
            one loader's packs are dealt to all ranks, as by accelerate and ms-swift.
    """

    @checked
    def __init__(
        self,
        dataset: Any,
        *,
        encode: Callable[[Any], Any] | None = None,
        split: bool = True,
        lengths: Sequence[int] | np.ndarray | None = None,
        shuffle: bool = False,
        seed: NonNegative = 0,
        repeat: bool = False,
        rank: NonNegative | None = None,
        world_size: Count | None = None,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        if shuffle and not has_indices(dataset):
            raise ValueError("shuffle needs a dataset with indices; shuffle the stream itself")
        if lengths is not None and (not has_indices(dataset) or len(lengths) != len(dataset)):
            raise ValueError(
                f"{len(lengths)} lengths: give one for each sample of a dataset with indices"
            )
        self.lengths = None if lengths is None else checked_sizes("lengths", lengths)
        self.encode = encode
        self.split = split
        self.shuffle = shuffle
        self.seed = seed
        self.repeat = repeat
        self._ranks = check_ranks(rank, world_size)
        self._pass: _Pass | None = None
        self._saved: Mapping[str, Any] | None = None
        self._counts = shared_counts()
        #: shared as well, for workers that live longer than an epoch
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @abstractmethod
    def make_pool(self) -> Pool[Any]:
        """A new pool, which packs a pass."""

    @abstractmethod
    def collate(self, samples: list[Any]) -> Any:
        """A pack as it is given out."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Settings that decide the packs: a state goes only with the same settings."""

    @property
    def set_aside(self) -> Counter[str]:
        """Samples that could not be used, by reason, over all workers of this rank."""
        return by_reason(self._counts)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the passes that begin from now on: another order if samples are shuffled;
        the dataset's own `set_epoch` is called when they begin."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        self._pass = _Pass(self, this_reader(self._ranks), saved)
        return self._pass

    def state_dict(self) -> dict[str, Any]:
        """State of this reader: plain values and arrays, no samples."""
        if self._pass is None or self._saved is not None:
            return dict(self._saved or {"epoch": int(self._epoch)})
        return self._pass.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the next pass where `state` was taken. Raises StageError, when the pass
        begins, if the settings or the readers are others."""
        self._saved = state
        # Loaders load when they begin; an epoch set before that is the trainer's word.
        self.set_epoch(max(int(self._epoch), state["epoch"]))

    def __getstate__(self) -> dict[str, Any]:
        """State for a spawned worker, which is in no process group."""
        return self.__dict__ | {"_ranks": rank_and_size(self._ranks), "_pass": None}


class _Pass:
    """One reader's pass over its samples: an iterator over packs."""

    def __init__(
        self, owner: OnlineDataset, reader: Reader, saved: Mapping[str, Any] | None
    ) -> None:
        self._owner = owner
        self._reader = reader
        if reader.world_size > 1 and reader.index == 0 and not (owner.repeat or saved):
            logger.warning(_UNEQUAL, reader.world_size)
        self._unusable = Unusable(owner._counts, reader.worker)
        order = {"shuffle": owner.shuffle, "seed": owner.seed}
        order |= {"num_samples": len(owner.dataset)} if owner.shuffle else {}
        self._made_with = owner.settings() | order | vars(reader)
        self._ready: deque[list[Sample]] = deque()
        self._begin(int(saved["epoch"] if saved else owner._epoch))
        if saved and "source" in saved:
            self._restore(saved)

    def _begin(self, epoch: int) -> None:
        """Its first sample is next."""
        owner = self._owner
        self._epoch = epoch
        self._source = open_source(
            owner.dataset,
            self._reader,
            epoch=epoch,
            shuffle_seed=owner.seed if owner.shuffle else None,
            split=owner.split,
            mark_every=owner.settings()["buffer_size"],
        )
        self._pool = owner.make_pool()
        #: samples of this epoch that were packed; of those with known lengths, that were given out
        self._num_packed = 0
        self._ended = False
        self._kept_state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            while not self._ready:
                if not self._ended:
                    self._read_one()
                    continue
                if not self._num_packed:
                    self._unusable.check_end(is_only_reader=self._reader.count == 1)
                    if self._owner.repeat:
                        place = f"worker {self._reader.worker} of rank {self._reader.rank}"
                        raise StageError(f"{place} has no sample to repeat; take fewer workers")
                if not self._owner.repeat:
                    raise StopIteration
                self._begin(self._epoch + 1)
            if contents := self._contents(self._ready.popleft()):
                return self._owner.collate(contents)

    def _contents(self, pack: list[Sample]) -> list[Any]:
        """The samples of a pack, except those that turn out to be unusable when they are read."""
        if self._owner.lengths is None:
            return [sample.content for sample in pack]
        contents = []
        for number, num_tokens, load in pack:
            try:
                contents.append(self._read(number, load, num_tokens).content)
            except SampleError as error:
                self._unusable.add(number, error, any_used=self._num_packed > 0)
        self._num_packed += len(contents)
        return contents

    def state(self) -> dict[str, Any]:
        """O(samples that wait) for the first pack of those made at once; for the others, which
        differ only in what is still ready, O(packs that are ready)."""
        if self._kept_state is None:
            ready = [[s[:2] for s in pack] for pack in self._ready]
            waiting = [s[:2] for s in self._pool.waiting]
            oldest = min((number for pack in [*ready, waiting] for number, _ in pack), default=None)
            self._kept_state = {
                "epoch": self._epoch,
                "made_with": dict(self._made_with),
                "ready": ready,
                "waiting": waiting,
                "pool": self._pool.state(),
                "ended": self._ended,
                "source": self._source.state(oldest),
            }
        ready = self._kept_state["ready"]
        return self._kept_state | {
            "ready": ready[len(ready) - len(self._ready) :],
            "num_packed": self._num_packed,
            "set_aside": self._unusable.counts.tolist(),
        }

    def _restore(self, saved: Mapping[str, Any]) -> None:
        for name, now in self._made_with.items():
            if (then := saved["made_with"].get(name)) != now:
                raise StageError(
                    f"the saved state is of {name} {then!r}, and now it is {now!r}; resume with "
                    "the same settings"
                )
        self._unusable.counts.copy_(torch.tensor(saved["set_aside"]))
        wanted = dict(pair for pack in [*saved["ready"], saved["waiting"]] for pair in pack)
        found = {}
        self._ended, self._num_packed = saved["ended"], saved["num_packed"]
        if wanted or not self._ended:
            loads = self._source.restore(saved["source"], wanted.keys())
            found = {number: self._read_again(number, wanted[number], loads) for number in wanted}
        self._ready.extend([found[number] for number, _ in pack] for pack in saved["ready"])
        waiting = [found[number] for number, _ in saved["waiting"]]
        self._pool.restore(saved["pool"], waiting)

    def _read_again(self, number: int, num_tokens: int, loads: Mapping[int, Load]) -> Sample:
        if self._owner.lengths is not None:
            return Sample(number, num_tokens, loads[number])
        return read_again(number, loads[number], self._owner.encode, num_tokens)

    def _read_one(self) -> None:
        self._kept_state = None
        found = self._source.next()
        if found is None:
            self._ended = True
            self._ready.extend(self._pool.finish())
            return
        number, load = found
        lengths = self._owner.lengths
        try:
            if lengths is None:
                sample = self._read(number, load)
            else:
                sample = Sample(number, int(lengths[number]), load)
            self._ready.extend(self._pool.add(sample, sample.num_tokens))
            self._num_packed += lengths is None
        except SampleError as error:
            self._unusable.add(number, error, any_used=self._num_packed > 0)

    def _read(self, number: int, load: Load, known_length: int | None = None) -> Sample:
        try:
            sample = read_sample(number, load, self._owner.encode)
            if known_length not in (None, sample.num_tokens):
                detail = f"{sample.num_tokens} tokens, and its length was given as {known_length}"
                raise SampleError("bad_record", detail)
        except SampleError:
            self._unusable.failures_in_a_row += 1
            raise
        self._unusable.failures_in_a_row = 0
        return sample
