"""Packing inside a PyTorch loader: the base of `PackedIterableDataset`, `ConstantLengthDataset` and
`DynamicBatches`.

Each reader (a loader process of a rank) packs its own part of the samples. An unusable sample is
set aside with its reason, logged and counted; their number is bounded, so that a run whose data do
not fit its settings ends with an error. The state that torchdata's StatefulDataLoader saves names
samples by number; their contents are read again.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from offline_packing.errors import StageError
from offline_packing.online.collate import count_tokens
from offline_packing.online.pools import PackingPool, Strategy
from offline_packing.online.reading import (
    IndexedSamples,
    Load,
    Reader,
    StreamedSamples,
    has_indices,
    rank_and_size,
    this_reader,
)
from offline_packing.planner.samples import checked_sizes
from offline_packing.planner.windows import WindowOptions
from task_encoders.field_types import Count, NonNegative, checked
from task_encoders.samples import REASONS, SampleError

logger = logging.getLogger(__name__)

#: Samples in a row that may fail to be read before the run ends, as in Energon.
MAX_FAILURES_IN_A_ROW: Final = 100
#: Samples that may be set aside for any reason before the first that can be used.
MAX_UNUSABLE_AT_FIRST: Final = 10_000
_REASON_NAMES: Final = tuple(REASONS)
_COUNTED_WORKERS: Final = 256
_NONE_OF_USE: Final = (
    "no sample can be used, the last one because of {}; check the dataset, and the length of packs"
)
_UNEQUAL: Final = (
    "each of %d ranks packs its own samples and may have more packs than another; one that ends "
    "early leaves the others waiting: set repeat=True, and count steps. Where one loader's packs "
    "are dealt to all ranks (accelerate, ms-swift), set rank=0, world_size=1"
)


class Sample(NamedTuple):
    """A sample on its way into a pack."""

    number: int
    num_tokens: int
    #: a `Load` where lengths are known beforehand
    content: Any


class OnlineDataset(IterableDataset[Any]):
    """Packs the samples of a dataset while they are read.

    Args:
        dataset: map-style, or iterable. A map-style one is split among ranks and workers by index.
        strategy: how samples are packed.
        settings: decide the packs: a state goes only with the same. A stream remembers its place
            every `buffer_size` samples.
        collate: the samples of a pack -> the item that the dataset yields.
        measure: a sample and its tokens -> its tokens and its amount of each budget in a pack.
            Raises SampleError if it is too large by itself. None: it has no budgets.
        encode: applied to a reader's own samples; an error sets the sample aside.
        split: for an iterable dataset: False if it divides itself among ranks and workers.
        lengths: tokens of each sample of a map-style dataset, if they are known: samples are then
            read when their pack is made, and do not wait in memory or get read again on resuming.
        shuffle: read a map-style dataset in an order of `seed` and the epoch (see `set_epoch`).
        repeat: begin the next epoch at the end of one, without end. Ranks make unequal numbers of
            packs of an epoch; with `repeat` each takes the steps that the trainer counts.
        rank, world_size: default: those of torch.distributed when the loader starts. 0 and 1 if one
            loader's packs are dealt to all ranks, as by accelerate and ms-swift.
    """

    @checked
    def __init__(
        self,
        dataset: Any,
        strategy: WindowOptions | Strategy,
        settings: Mapping[str, Any],
        collate: Callable[[list[Any]], Any],
        measure: Callable[[Any, int], tuple[int, Mapping[str, int]]] | None = None,
        /,
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
        self.strategy, self.settings = strategy, settings
        self.collate, self.measure = collate, measure
        if shuffle and not has_indices(dataset):
            raise ValueError("shuffle needs a dataset with indices; shuffle the stream instead")
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
        if (rank is None) != (world_size is None):
            raise ValueError("rank and world_size go together; give both or neither")
        self._ranks: tuple[int, int] | None = None
        if rank is not None and world_size is not None:
            if rank >= world_size:
                raise ValueError(f"rank is {rank}, not in 0..world_size - 1 = {world_size - 1}")
            self._ranks = rank, world_size
        self._pass: _Pass | None = None
        self._saved: Mapping[str, Any] | None = None
        # In shared memory: the trainer sees its workers' counts, by worker and reason; workers that
        # live longer than an epoch see the next one.
        counts = torch.zeros(_COUNTED_WORKERS, len(REASONS), dtype=torch.int64)
        self._counts = counts.share_memory_()
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def set_aside(self) -> Counter[str]:
        """Samples that could not be used, by reason, over all workers of this rank."""
        totals = self._counts.sum(dim=0).tolist()
        return +Counter(dict(zip(_REASON_NAMES, totals, strict=True)))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the passes that begin from now on: another order if samples are
        shuffled; the dataset's own `set_epoch` is called when they begin."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        self._pass = _Pass(self, this_reader(self._ranks), saved)
        return self._pass

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this reader: plain values and arrays, no samples."""
        if self._pass is None or self._saved is not None:
            return dict(self._saved or {"epoch": int(self._epoch)})
        return self._pass.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the next pass where `state` was taken. Raises StageError, when the pass
        begins, if the settings or the readers differ."""
        self._saved = state
        # Loaders load when they begin; an epoch set before that is the trainer's word.
        self.set_epoch(max(int(self._epoch), state["epoch"]))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned worker, which is in no process group."""
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
        #: samples that this reader set aside, by reason; unreadable ones since the last readable
        #: one; in this pass; and the reason of the last
        self._set_aside = owner._counts[reader.worker % _COUNTED_WORKERS]
        self._failures_in_a_row = self._num_unusable = 0
        self._last_error: SampleError | None = None
        order = {"shuffle": owner.shuffle, "seed": owner.seed}
        order |= {"num_samples": len(owner.dataset)} if owner.shuffle else {}
        self._made_with = {**owner.settings, **order, **vars(reader)}
        self._ready: deque[list[Sample]] = deque()
        self._begin(int(saved["epoch"] if saved else owner._epoch))
        if saved and "source" in saved:
            self._restore(saved)

    def _begin(self, epoch: int) -> None:
        """Start an epoch."""
        owner = self._owner
        self._epoch = epoch
        if hasattr(owner.dataset, "set_epoch"):
            owner.dataset.set_epoch(epoch)
        self._source: IndexedSamples | StreamedSamples
        if has_indices(owner.dataset):
            order = np.arange(len(owner.dataset))
            if owner.shuffle:
                order = np.random.default_rng([owner.seed, epoch]).permutation(order)
            self._source = IndexedSamples(owner.dataset, self._reader, order)
        else:
            every = owner.settings["buffer_size"]
            self._source = StreamedSamples(
                owner.dataset, self._reader, split=owner.split, mark_every=every
            )
        self._pool = PackingPool[Sample](owner.strategy)
        #: samples of this epoch that were packed; with known lengths, that were given out
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
                    self._check_end()
                if not self._owner.repeat:
                    raise StopIteration
                self._begin(self._epoch + 1)
            if contents := self._contents(self._ready.popleft()):
                return self._owner.collate(contents)

    def _check_end(self) -> None:
        """Raise StageError at the end of an epoch without a usable sample; one of many readers may
        have had only a few."""
        had_many = self._reader.count == 1 or self._num_unusable >= MAX_FAILURES_IN_A_ROW
        if had_many and self._last_error is not None:
            raise StageError(_NONE_OF_USE.format(self._last_error)) from self._last_error
        if self._owner.repeat:
            place = f"worker {self._reader.worker} of rank {self._reader.rank}"
            raise StageError(f"{place} has no sample to repeat; set fewer workers")

    def _contents(self, pack: list[Sample]) -> list[Any]:
        """Return the samples of a pack, without those that prove unusable when they are read."""
        if self._owner.lengths is None:
            return [sample.content for sample in pack]
        contents = []
        for number, num_tokens, load in pack:
            try:
                contents.append(self._read(number, load, num_tokens).content)
            except SampleError as error:
                self._add_unusable(number, error)
        self._num_packed += len(contents)
        return contents

    def state(self) -> dict[str, Any]:
        """Return the state: O(waiting samples) for the first of several packs made at once; O(ready
        packs) for the others, which differ only in these."""
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
            "set_aside": self._set_aside.tolist(),
        }

    def _restore(self, saved: Mapping[str, Any]) -> None:
        for name, now in self._made_with.items():
            if (then := saved["made_with"].get(name)) != now:
                raise StageError(
                    f"the saved state is of {name} {then!r}, and now it is {now!r}; resume with "
                    "the same settings"
                )
        self._set_aside.copy_(torch.tensor(saved["set_aside"]))
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
        """Read a sample that waited. Raises StageError if it has changed."""
        if self._owner.lengths is not None:
            return Sample(number, num_tokens, loads[number])
        try:
            sample = self._read(number, loads[number])
        except SampleError as error:
            raise StageError(f"sample {number} was readable before the restart: {error}") from error
        if sample.num_tokens != num_tokens:
            raise StageError(
                f"sample {number} has {sample.num_tokens} tokens, and had {num_tokens} before the "
                "restart; encode the same sample in the same way every time"
            )
        return sample

    def _read_one(self) -> None:
        self._kept_state = None
        found = self._source.next()
        if found is None:
            self._ended = True
            self._ready.extend(self._pool.finish())
            return
        number, load = found
        lengths, measure = self._owner.lengths, self._owner.measure
        try:
            if lengths is None:
                sample = self._read(number, load)
            else:
                sample = Sample(number, int(lengths[number]), load)
            tokens = sample.num_tokens
            sizes = (tokens,) if measure is None else measure(sample.content, tokens)
            self._ready.extend(self._pool.add(sample, *sizes))
            self._num_packed += lengths is None
        except SampleError as error:
            self._add_unusable(number, error)

    def _read(self, number: int, load: Load, known_length: int | None = None) -> Sample:
        """Load and encode a sample. Raises SampleError if it cannot be used."""
        encode = self._owner.encode
        self._failures_in_a_row += 1
        try:
            content = load() if encode is None else encode(load())
            num_tokens = count_tokens(content)
        except SampleError:
            raise
        except Exception as error:
            raise SampleError("bad_record", f"{type(error).__name__}: {error}") from error
        if known_length not in (None, num_tokens):
            detail = f"{num_tokens} tokens, and its length was given as {known_length}"
            raise SampleError("bad_record", detail)
        self._failures_in_a_row = 0
        return Sample(number, num_tokens, content)

    def _add_unusable(self, number: int, error: SampleError) -> None:
        """Set a sample aside. Raises StageError if it is one too many."""
        logger.warning("set aside sample %d: %s", number, error)
        self._last_error = error
        self._num_unusable += 1
        self._set_aside[_REASON_NAMES.index(error.reason)] += 1
        if self._failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            raise StageError(
                f"{MAX_FAILURES_IN_A_ROW} samples in a row cannot be read, the last one, {number}, "
                f"with {error}; check the dataset"
            ) from error
        if self._num_unusable == MAX_UNUSABLE_AT_FIRST and not self._num_packed:
            raise StageError(_NONE_OF_USE.format(error)) from error
