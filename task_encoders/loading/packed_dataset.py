"""Energon's dataset and loader with what packs need: their order, checks, and exact states."""

from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megatron.energon import (
    SavableDataLoader,
    SavableDataset,
    WorkerConfig,
    get_train_dataset,
    get_val_dataset,
)
from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint

from task_encoders.energon_samples import PackedBatch
from task_encoders.field_types import Count, checked
from task_encoders.loading.folder_shards import no_packs
from task_encoders.loading.schedule import starting_workers
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.rows.pack_dealing import OnePass
from task_encoders.storage.energon_paths import energon_path


@checked
def get_packed_train_dataset(
    path: str | Path,
    task_encoder: PackedTaskEncoder,
    *,
    micro_batch_size: Count | None = 1,
    worker_config: WorkerConfig | None = None,
    **kwargs: Any,
) -> SavableDataset[Any]:
    """Call Energon's `get_train_dataset`, keeping the order in which packs were written.

    With its defaults Energon shuffles shards and reads several at once, which undoes an order that
    gives all ranks packs of similar cost. The price of keeping it: every epoch has the same order,
    except for packs left over where they do not divide evenly (see `pack_dealing.DealtPacks`).

    Args:
        path: a written folder, or a metadataset YAML that blends several.
        micro_batch_size: packs per row; None: packs one by one, as `PackedRowSample`.
        worker_config: default: torch.distributed's rank and world size, two workers.
        kwargs: any other argument of `megatron.energon.get_train_dataset`.

    Raises:
        PackingSettingsError: the environment or the task encoder contradicts the data.
    """
    order = {
        "shuffle_buffer_size": None,
        "max_samples_per_sequence": None,
        "shuffle_over_epochs_multiplier": None,
        "parallel_shard_iters": 1,
    }
    return get_train_dataset(
        energon_path(path),
        task_encoder=task_encoder,
        batch_size=micro_batch_size,
        worker_config=worker_config or WorkerConfig.default_worker_config(num_workers=2),
        **(order | kwargs),
    )


@checked
def get_packed_val_dataset(
    path: str | Path,
    task_encoder: PackedTaskEncoder,
    *,
    micro_batch_size: Count = 1,
    worker_config: WorkerConfig | None = None,
    **kwargs: Any,
) -> SavableDataset[PackedBatch]:
    """Call Energon's `get_val_dataset` with the same arguments.

    Raises:
        PackedFolderError: there are no packs in the val split.
        PackingSettingsError: the environment or the task encoder contradicts the data.
    """
    split = kwargs.get("split_part", "val")
    try:
        return get_val_dataset(
            energon_path(path),
            task_encoder=task_encoder,
            batch_size=micro_batch_size,
            worker_config=worker_config or WorkerConfig.default_worker_config(num_workers=2),
            **kwargs,
        )
    except (EmptyDatasetError, KeyError, AssertionError) as error:
        if repr(split) not in str(error):  # "Invalid split part: 'val'", or the key alone
            raise
        raise no_packs(path, split) from error


def get_packed_loader(dataset: SavableDataset[PackedBatch], **kwargs: Any) -> "PackedLoader":
    """Call Energon's `get_savable_loader` for packs: a restored loader resumes at once and exactly.

    Args:
        dataset: of `get_packed_train_dataset` or any other Energon call with our task encoder.
        kwargs: any other argument of `megatron.energon.get_savable_loader`.
    """
    if not isinstance(dataset, SavableDataset):
        raise ValueError(
            f"dataset is a {type(dataset).__name__}; it must be a dataset of Energon, such as "
            "get_packed_train_dataset returns"
        )
    return PackedLoader(dataset, **kwargs)


class PackedLoader(SavableDataLoader[PackedBatch]):
    """Energon's savable loader, with a state after every batch.

    Energon's workers save a state once a minute; a restored loader encodes later batches again and
    discards them. A state of packs is a few numbers, so here each batch has one.
    """

    def __init__(self, dataset: SavableDataset[PackedBatch], **kwargs: Any) -> None:
        every_batch = {"checkpoint_every_sec": 0, "checkpoint_every_min_n_samples": 1}
        super().__init__(dataset, **(every_batch | kwargs))
        #: of each worker, the last batch before this pass; None in the first pass
        self._last_of_pass_before: list[int] | None = None

    def __iter__(self) -> Any:
        if self._epoch_iterator is None and self._has_workers:
            self._last_of_pass_before = list(self._worker_sample_counters)
        return super().__iter__()

    def _epoch_iter(self) -> Any:
        try:
            yield from super()._epoch_iter()
        except (ConnectionError, EOFError) as error:
            # A worker that dies while it sends a batch: torch would notice on the next one only.
            workers = getattr(_running(self), "_workers", [])
            if not wait([worker.sentinel for worker in workers], timeout=1):
                raise
            raise RuntimeError(f"a loader worker exited unexpectedly: {error}") from error

    def _get_iterator(self) -> Any:
        if not self._has_workers:
            return super()._get_iterator()
        with starting_workers(self.worker_config.num_workers):
            return super()._get_iterator()

    def save_state_rank(self) -> SavableDataLoaderState | None:
        """Save as Energon does, with two exceptions. A worker that has delivered nothing in this
        pass yet is at its start, not at the end of the previous pass; a worker yet to begin is
        where it will begin."""
        # Between iter() and the first batch no worker runs yet; Energon would wait for an answer.
        if _running(self) is None:
            self._has_workers = False
        state = super().save_state_rank()
        if state is None:
            return None
        if self._has_workers:
            # A worker asked before it has read anything returns the state None and one sample to
            # skip: that sample would be lost.
            states = state.worker_states
            begin = self.dataset.get_initial_checkpoint()
            begin = begin or [SavableDatasetCheckpoint(state=None, offset=0)] * len(states)
            pairs = zip(states, begin, strict=True)
            state.worker_states = [old if old.state else new for old, new in pairs]
        before, now = self._last_of_pass_before, self._worker_sample_counters
        if before is None or self._epoch_iterator is None or before == now:
            return state
        for worker, (old, new) in enumerate(zip(before, now, strict=True)):
            if old == new:
                _begin_pass(state.worker_states[worker].state.dataset_state)
        return state

    def restore_state_rank(self, state: SavableDataLoaderState | None) -> None:
        """Restore as Energon does. Raises ValueError for a state of another number of workers."""
        states = [] if state is None else state.worker_states
        then = sum(isinstance(one, SavableDatasetCheckpoint) for one in states)  # in a worker
        now = self.worker_config.num_workers
        if state is not None and then != now:
            raise ValueError(
                f"the state is of {then} loader workers, and now there are {now}; resume with as "
                "many as before"
            )
        super().restore_state_rank(state)

    def close(self) -> None:
        """End the workers. Left to the garbage collector, each of them takes 5 s."""
        workers = _running(self)
        self._iterator = self._epoch_iterator = None
        if workers is not None:
            workers._shutdown_workers()


def _running(loader: SavableDataLoader[Any]) -> Any:
    """Return the iterator that drives the loader's workers, or None; torch does not name it."""
    return vars(loader).get("_iterator")


def _begin_pass(state: Any) -> None:
    """Turn a dataset's state at the end of a pass into one at the beginning of the next."""
    if state["__class__"] == OnePass.__name__:
        state["_is_over"] = False
    else:
        for inner in state["datasets"]:
            _begin_pass(inner)
