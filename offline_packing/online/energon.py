"""Energon's samples packed while training: measured first, planned in windows, decoded last.

    task_encoder = OnlineTaskEncoder(processor=…, seq_length=8192)
    dataset = get_online_train_dataset("data/energon", task_encoder, buffer=1000)
    for batch in get_packed_loader(dataset): ...

Energon's own packing buffer encodes every sample before it plans, and holds all of them with their
pixels. Here a waiting sample is its length and Energon's restore key: it is read a second time when
its pack is final. The key is also all that a saved state holds of it.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from megatron.energon import Sample, SavableDataset, WorkerConfig, get_loader, get_train_dataset
from megatron.energon.errors import ErrorContext, FatalSampleError
from megatron.energon.flavors.base_dataset import set_sample_restore_key
from megatron.energon.state import FlexState
from megatron.energon.wrappers import MapDataset
from megatron.energon.wrappers.base import BaseWrapperDataset
from megatron.energon.wrappers.repeat_dataset import RepeatDataset

from offline_packing.online.pools import PackingPool
from offline_packing.planner.samples import check_known
from offline_packing.planner.windows import WindowOptions
from task_encoders.energon_samples import PackedBatch, PackedRowSample
from task_encoders.field_types import BudgetName, Count, NonNegative, checked
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.rows.encoded_rows import SetAside
from task_encoders.rows.row_encoder import measure
from task_encoders.sample_encoder import sizes_of
from task_encoders.samples import SampleError
from task_encoders.storage.energon_paths import energon_path

RestoreKey = tuple[Any, ...]


class OnlineTaskEncoder(PackedTaskEncoder):
    """`PackedTaskEncoder` for data that are not packed, whose rows are packs.

    Works in any Energon call, with windows of 1,000 samples or as `windows` is set. Packs in a
    blend are items like any other sample.
    """

    def __init__(self, **options: Any) -> None:
        """Take the arguments of `PackedTaskEncoder`."""
        super().__init__(**options)
        self.windows = WindowOptions(seq_length=self.seq_length)

    def measure(self, sample: Sample) -> Mapping[str, int]:
        """Measure a sample in a pack: tokens, with padding, vision_patches, images and videos.

        Raises:
            SampleError: it cannot be used.
            FatalSampleError: the environment contradicts it.
        """
        taken = dict.fromkeys(("tokens", *get_args(BudgetName)), 0)
        sub_samples = self.sub_samples(sample)
        for sub_sample in sub_samples:
            try:
                length = measure(sub_sample, self.encoder)
            except SampleError:
                if len(sub_samples) == 1:
                    raise
                continue  # of a pack; its row will tell
            sizes = sizes_of(length, sub_sample.images, sub_sample.videos)
            sizes["tokens"] = -(-length.num_tokens // self.pad_multiple) * self.pad_multiple
            taken = {name: taken[name] + size for name, size in sizes.items()}
        return taken

    def build_encode_sample(
        self, dataset: SavableDataset[Any], *, worker_config: WorkerConfig
    ) -> SavableDataset[PackedRowSample]:
        """Pack the samples of a dataset; Energon calls this to encode them."""
        if isinstance(dataset, RepeatDataset) and dataset.repeats is None:
            # Packs repeat, not samples: so samples left over come out at the end of each epoch.
            packs = OnlinePacks(dataset.dataset, self, worker_config=worker_config)
            return RepeatDataset(packs, worker_config=worker_config)
        return OnlinePacks(dataset, self, worker_config=worker_config)


@checked
def get_online_train_dataset(
    path: str | Path,
    task_encoder: OnlineTaskEncoder,
    *,
    buffer: Count = 1000,
    strategy: str = "auto",
    budgets: Mapping[str, Count] | None = None,
    seed: NonNegative = 0,
    micro_batch_size: Count = 1,
    worker_config: WorkerConfig | None = None,
    **kwargs: Any,
) -> SavableDataset[PackedBatch]:
    """Return Energon's train dataset, packed while training; give it to `get_packed_loader`.

    Energon shuffles runs of 100 samples; here each window's packs are shuffled. In an epoch every
    sample comes once; samples left over at its end make packs less full. A blend by weights has no
    epochs: there they wait for others, 16 windows at most (16 packs, if windows hold less).

    Args:
        path: a folder prepared for Energon, or a metadataset YAML.
        buffer: samples that each worker takes in before it plans again.
        strategy, seed: of the planner; the seed is also that of the order of a window's packs.
        budgets: limits of a pack besides tokens: vision_patches, images, videos.
        kwargs: any other argument of `megatron.energon.get_train_dataset`; the others are those of
            `get_packed_train_dataset`.

    Raises:
        ValueError, PackingSettingsError: an option is bad, or contradicts the data.
    """
    for name in budgets or {}:
        check_known("budget", name, get_args(BudgetName))
    encoder = copy.copy(task_encoder)
    encoder.windows = replace(
        task_encoder.windows, window=buffer, strategy=strategy, budgets=budgets or {}, seed=seed
    )
    order = {"shuffle_buffer_size": None, "max_samples_per_sequence": 100}
    return get_train_dataset(
        energon_path(path),
        task_encoder=encoder,
        batch_size=micro_batch_size,
        worker_config=worker_config or WorkerConfig.default_worker_config(num_workers=2),
        **(order | kwargs),
    )


class MeasuringTaskEncoder(OnlineTaskEncoder):
    """Yields the sizes of samples in a pack instead of rows, to know the data before training."""

    def build_encode_sample(
        self, dataset: SavableDataset[Any], *, worker_config: WorkerConfig
    ) -> SavableDataset[Any]:
        """Measure the samples of a dataset; Energon calls this to encode them."""
        measured = MapDataset(dataset, self.measure, worker_config=worker_config)
        SetAside(worker_config.global_error_handler).watch(measured)
        return measured

    def build_batch(self, *args: Any, **kwargs: Any) -> SavableDataset[Any]:
        """Return the samples without batches; Energon calls this to make them."""
        return args[0]


def measure_some(
    path: str | Path, task_encoder: MeasuringTaskEncoder, count: int = 1000
) -> tuple[list[Mapping[str, int]], int]:
    """Measure the first samples, in the shuffled order of `get_online_train_dataset`. Return their
    sizes in a pack, and how many samples there are, good or bad."""
    here = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_online_train_dataset(path, task_encoder, worker_config=here, repeat=False)
    return list(islice(get_loader(dataset), count)), len(dataset)


class OnlinePacks(BaseWrapperDataset[Sample, PackedRowSample]):
    """One pass over samples, as rows of packs; the passes after it are the next epochs'."""

    _savable_fields = ("_source_ended", "_num_rows", "_set_aside")

    def __init__(
        self,
        dataset: SavableDataset[Sample],
        encoder: OnlineTaskEncoder,
        *,
        worker_config: WorkerConfig,
    ) -> None:
        """Pack a dataset. Raises ValueError if the samples cannot be read a second time."""
        super().__init__(dataset, worker_config=worker_config)
        if not dataset.can_restore_sample():
            raise ValueError(
                "samples are read again once their pack is final; mark your cooker as @stateless"
            )
        self._encoder = encoder
        self._set_aside = SetAside(worker_config.global_error_handler)
        self._set_aside.watch(dataset)
        self._failures = ErrorContext("OnlinePacks", self._set_aside)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._pool = PackingPool[RestoreKey](self._encoder.windows)
        #: packs that are final, in the order in which they will be given
        self._ready: list[list[RestoreKey]] = []
        self._source_ended = False
        #: given in this pass
        self._num_rows = 0
        self._set_aside.lines.clear()

    def save_state(self) -> FlexState:
        state = super().save_state()
        return FlexState(
            **state,
            ready=[list(keys) for keys in self._ready],
            windows=asdict(self._encoder.windows),
            pool=self._pool.state(),
            waiting=self._pool.waiting,
        )

    def restore_state(self, state: FlexState) -> None:
        super().restore_state(state)
        if (saved := WindowOptions(**state["windows"])) != self._encoder.windows:
            raise ValueError(
                f"the state was saved with {saved}, and this is {self._encoder.windows}; resume "
                "with the same"
            )
        self._ready = [list(keys) for keys in state["ready"]]
        self._pool.restore(state["pool"], state["waiting"])

    def __iter__(self) -> Iterator[PackedRowSample]:
        yield from self._set_aside.tell(self._rows())

    def _rows(self) -> Iterator[PackedRowSample]:
        source = iter(self.dataset)
        while True:
            while self._ready:
                row = self._row(self._ready.pop(0))
                if row is not None:
                    self._num_rows += 1
                    yield row
            if self._source_ended:
                break
            sample = next(source, None)
            if sample is None:
                self._source_ended = True
                self._ready = self._pool.finish()
                continue
            with self._failures.handle_errors(sample):
                taken = self._encoder.measure(sample)
                self._ready = self._pool.add(sample.__restore_key__, taken["tokens"], taken)
        if self._set_aside.lines and not self._num_rows:
            raise FatalSampleError(
                f"none of the {len(self._set_aside.lines)} samples of a loader worker can be used; "
                f"the first is {self._set_aside.lines[0]}"
            )
        self._source_ended, self._num_rows = False, 0

    def _row(self, keys: list[RestoreKey]) -> PackedRowSample | None:
        """Encode the row of a pack; None if none of its samples can be decoded."""
        samples = [self.dataset.restore_sample(key) for key in keys]
        with self._failures.handle_errors(samples[0]):
            sub_samples = [one for sample in samples for one in self._encoder.sub_samples(sample)]
            row = self._encoder.encode_row(samples[0], sub_samples)
            row.__sources__ = tuple(one for sample in samples for one in sample.__sources__ or ())
            return set_sample_restore_key(row, *keys, src=self)
        return None

    def restore_sample(self, restore_key: RestoreKey) -> PackedRowSample:
        """Restore a row by its key, for debugging as Energon does it."""
        name, *keys = restore_key
        assert name == type(self).__name__
        row = self._row(keys)
        assert row is not None
        return row

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Count samples: how many packs they make is known at the end."""
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "windows": asdict(self._encoder.windows),
            "dataset": self.dataset.config(),
        }
