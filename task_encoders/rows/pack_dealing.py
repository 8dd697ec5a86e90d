"""Dealing of packs to a loader's workers: each comes equally often, even after a restart.

Energon gives each worker a block of packs to loop over. Where packs do not divide evenly, a worker
with fewer loops faster, and its packs come more often. `DealtPacks` deals the packs left over to
another worker in every epoch. `OnePass` remembers the end of a pass over data that do not repeat,
which Energon's own loader forgets: it would begin again.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.flavors.webdataset.sample_loader import (
    RawSampleData,
    WebdatasetSampleLoaderDataset,
)
from megatron.energon.flavors.webdataset.sharder import Sharder
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset

from task_encoders.energon_samples import PackedBatch

Numbers = npt.NDArray[np.int64]


def deal_evenly(
    dataset: SavableDataset[Any], loaded: LoadedDataset, first_turn: int
) -> SavableDataset[Any]:
    """Replace Energon's reader with `DealtPacks`, where it keeps the written order.

    Args:
        dataset: what Energon built from `loaded`; changed in place.
        first_turn: the worker that gets the first pack left over: in a blend, the one after the
            last that the previous dataset dealt to.
    """
    factory = loaded.dataset
    reader: Any = dataset
    while isinstance(reader, BaseWrapperDataset):
        wrapper, reader = reader, reader.dataset
    if not isinstance(reader, WebdatasetSampleLoaderDataset):
        return dataset
    if not getattr(factory, "training", False):
        return dataset
    if reader.shuffle_over_epochs is not None or len(reader.join_readers) != 1:
        return dataset
    subset = getattr(factory, "subset", None)
    own = (0, len(factory)) if subset is None else subset.compute_subset(len(factory))
    wrapper.datasets = (DealtPacks(reader, own, first_turn),)
    return dataset


def deal(
    packs: tuple[int, int], first_turn: int, epoch: int, num_ranks: int, per_rank: int
) -> list[Numbers]:
    """Deal the packs of an epoch, [start, end), to workers, rank by rank.

    Args:
        first_turn: see `deal_evenly`.
        per_rank: workers of each rank.
    """
    workers = num_ranks * per_rank
    start, end = packs
    everyone = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    starts = Sharder.split_samples_to_workers(start, end, everyone, rotation_offset=first_turn)
    block = (end - start) // workers
    dealt = [np.arange(first, first + block) for first in starts[:-1]]
    by_turn = [rank * per_rank + worker for worker in range(per_rank) for rank in range(num_ranks)]
    longer = [starts[one] + block for one in by_turn if starts[one + 1] - starts[one] > block]
    for place, left_over in enumerate(longer, first_turn + epoch * ((end - start) % workers)):
        worker = by_turn[place % workers]
        dealt[worker] = np.append(dealt[worker], left_over)
    return dealt


class DealtPacks(WebdatasetSampleLoaderDataset):
    """The packs [start, end) of one folder, as one worker reads them in every epoch.

    Each worker has the block that Energon would give it, cut to the length of the shortest. The
    packs left over are dealt to the workers in turn, continuing from epoch to epoch:

        7 packs, 3 workers      worker 0   worker 1   worker 2
        epoch 0                  0 1 6       2 3        4 5
        epoch 1                  0 1         2 3 6      4 5

    So each epoch contains every pack once, and at any step the packs' counts differ by at most one
    (by two with micro batches of several packs, while not all workers have had their turn).
    """

    _savable_fields = ("_epoch", "_index", "_is_over")

    def __init__(
        self, reader: WebdatasetSampleLoaderDataset, packs: tuple[int, int], first_turn: int
    ) -> None:
        self._packs, self._first_turn = packs, first_turn
        super().__init__(
            reader.join_readers, reader.workers_slice_offsets, worker_config=reader.worker_config
        )

    def reset_state_own(self) -> None:
        self._epoch = 0
        #: packs returned in this epoch
        self._index = 0
        self._is_over = False

    def worker_has_samples(self) -> bool:
        return self._packs[0] < self._packs[1]

    def __iter__(self) -> Iterator[RawSampleData]:
        if self._is_over:
            self._epoch, self._index, self._is_over = self._epoch + 1, 0, False
        self.worker_config.assert_worker()
        config, per_rank = self.worker_config, max(1, self.worker_config.num_workers)
        worker = config.rank * per_rank + config.rank_worker_id()
        everyone = self._epoch, config.world_size, per_rank
        packs = deal(self._packs, self._first_turn, *everyone)[worker].tolist()
        while self._index < len(packs):
            sample = self._get_sample(packs[self._index])
            self._index += 1
            if sample.data[0] is not None:
                yield sample
        self._is_over = True


class OnePass(BaseWrapperDataset[PackedBatch, PackedBatch]):
    """Data that do not repeat, with a state that records their end.

    A state saved at the end restores the end: the first pass after it is empty, the next complete.
    """

    _savable_fields = ("_is_over",)

    def __init__(self, dataset: SavableDataset[PackedBatch]) -> None:
        super().__init__(dataset, worker_config=dataset.worker_config)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._is_over = False
        self._is_restored = False
        self._next_is_empty = False
        self._skipped_to_end = False

    def restore_state(self, state: FlexState) -> None:
        super().restore_state(state)
        self._is_restored = True
        self._next_is_empty = self._is_over

    def save_state(self) -> FlexState:
        self._skipped_to_end = False
        return super().save_state()

    def __iter__(self) -> Iterator[PackedBatch]:
        if self._next_is_empty or self._skipped_to_end:
            self._next_is_empty = self._skipped_to_end = False
            return
        self._is_over = False
        yield from self.dataset
        self._is_over = True
        # Energon's workers resume from an older state and skip the rows delivered since. If no row
        # is left, they iterate again at once; after a real pass they save a state first.
        self._skipped_to_end = self._is_restored and self.worker_config.num_workers > 0
        self._is_restored = False

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}
