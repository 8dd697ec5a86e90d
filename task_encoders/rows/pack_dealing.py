"""Which packs a loader's workers read: each comes equally often, even after a restart.

Energon gives each worker a block of packs to loop over. Where packs do not divide evenly, a worker
with fewer loops faster, and its packs come more often. `DealtPacks` deals the packs left over to
another worker in every epoch. `OnePass` remembers the end of a pass over data that do not repeat,
which Energon's own loader forgets: it would begin again.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
from task_encoders.settings import packs_of_epochs


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
    ranges, begin = [], 0
    for size in packs_of_epochs(factory.paths[0]) or [len(factory)]:
        start, end = (0, size) if subset is None else subset.compute_subset(size)
        ranges.append((begin + start, begin + end))
        begin += size
    wrapper.datasets = (DealtPacks(reader, ranges, first_turn),)
    return dataset


class _Deal(NamedTuple):
    """How the packs of an epoch are dealt to all workers."""

    #: where each worker's block begins, rank by rank, as Energon splits
    starts: Sequence[int]
    #: packs of each
    block: int
    left_over: list[int]

    @classmethod
    def of(cls, start: int, end: int, config: WorkerConfig, first_turn: int) -> "_Deal":
        ranks, per_rank = config.world_size, max(1, config.num_workers)
        workers = ranks * per_rank
        everyone = WorkerConfig(rank=0, world_size=1, num_workers=workers)
        starts = Sharder.split_samples_to_workers(start, end, everyone, rotation_offset=first_turn)
        block = (end - start) // workers
        by_turn = (rank * per_rank + worker for worker in range(per_rank) for rank in range(ranks))
        longer = (one for one in by_turn if starts[one + 1] - starts[one] > block)
        return cls(starts, block, [starts[one] + block for one in longer])


class DealtPacks(WebdatasetSampleLoaderDataset):
    """The packs of one folder, as one worker reads them: in each epoch those of its range
    [start, end), and after the last range the first again.

    Each worker has the block that Energon would give it, cut to the length of the shortest. The
    packs left over are dealt to the workers in turn, continuing from epoch to epoch:

        7 packs, 3 workers      worker 0   worker 1   worker 2
        epoch 0                  0 1 6       2 3        4 5
        epoch 1                  0 1         2 3 6      4 5

    So each epoch contains every pack once, and at any step the packs' counts differ by at most one
    (with micro batches of several packs: by two, while some workers have had their turn and others
    have not).
    """

    _savable_fields = ("_epoch", "_index", "_is_over")

    def __init__(
        self,
        reader: WebdatasetSampleLoaderDataset,
        ranges: Sequence[tuple[int, int]],
        first_turn: int,
    ) -> None:
        config = reader.worker_config
        self._workers = config.world_size * max(1, config.num_workers)
        self._first_turn = first_turn
        self._deals = [_Deal.of(start, end, config, first_turn) for start, end in ranges]
        super().__init__(reader.join_readers, reader.workers_slice_offsets, worker_config=config)

    def reset_state_own(self) -> None:
        self._epoch = 0
        #: packs returned in this epoch
        self._index = 0
        self._is_over = False

    def worker_has_samples(self) -> bool:
        return any(deal.block + len(deal.left_over) > 0 for deal in self._deals)

    def __iter__(self) -> Iterator[RawSampleData]:
        if self._is_over:
            self._epoch, self._index, self._is_over = self._epoch + 1, 0, False
        packs = self._packs_of_epoch()
        while self._index < len(packs):
            sample = self._get_sample(packs[self._index])
            self._index += 1
            if sample.data[0] is not None:
                yield sample
        self._is_over = True

    def _packs_of_epoch(self) -> list[int]:
        """This worker's packs, by their place in the folder."""
        self.worker_config.assert_worker()
        worker, ranks = self.worker_config.rank_worker_id(), self.worker_config.world_size
        cycles, number = divmod(self._epoch, len(self._deals))
        deal = self._deals[number]
        start = deal.starts[self.worker_config.rank * (self._workers // ranks) + worker]
        packs = list(range(start, start + deal.block))
        turn = worker * ranks + self.worker_config.rank
        before = [*self._deals * cycles, *self._deals[:number]]
        dealt = self._first_turn + sum(len(one.left_over) for one in before)
        place = (turn - dealt) % self._workers
        return packs + deal.left_over[place : place + 1]


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
        # Energon's workers resume from an older state and skip what was delivered since. If nothing
        # is left then, they iterate again at once; after a real pass they save a state first.
        self._skipped_to_end = self._is_restored and self.worker_config.num_workers > 0
        self._is_restored = False

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}
