"""Energon's dataset and loader with what packs need: their order, checks, and exact states, from
which other ranks or workers may go on."""

import gc
import json
from collections.abc import Sequence
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
from megatron.energon.rng import SystemRng
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.state import FlexState
from megatron.energon.wrappers import BlendDataset, RepeatDataset

from task_encoders.energon_samples import PackedBatch
from task_encoders.field_types import Count, checked
from task_encoders.loading.folder_shards import no_packs
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.references import metadataset_of
from task_encoders.rows.pack_dealing import DealtPacks, OnePass


@checked
def get_packed_train_dataset(
    path: str | Path,
    task_encoder: PackedTaskEncoder,
    *,
    micro_batch_size: Count | None = 1,
    worker_config: WorkerConfig | None = None,
    **kwargs: Any,
) -> SavableDataset[Any]:
    """Energon's `get_train_dataset`, keeping the order in which packs were written.

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
        metadataset_of(path),
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
    """Energon's `get_val_dataset` with the same arguments.

    Raises:
        PackedFolderError: there are no packs in the val split.
        PackingSettingsError: the environment or the task encoder contradicts the data.
    """
    split = kwargs.get("split_part", "val")
    try:
        return get_val_dataset(
            metadataset_of(path),
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
    """Energon's `get_savable_loader` for packs: a restored loader resumes at once and exactly.

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

    Energon's workers save a state once a minute; a restored loader encodes again, and discards,
    what was delivered since. The state of packs is a few numbers, so here each batch has one.
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
        # Garbage collection in a worker writes to, and so copies, every page shared with its
        # parent, unless the parent froze them: eight workers then start in a sixth of the time.
        gc.collect()
        gc.freeze()
        try:
            return super()._get_iterator()
        finally:
            gc.unfreeze()

    def save_state_rank(self) -> SavableDataLoaderState | None:
        """Same as Energon's, but a worker that has delivered nothing in this pass yet is at its
        start, not at the end of the previous one; one yet to begin is where it will begin."""
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
        """Same as Energon's. Raises ValueError for a state of another number of workers."""
        states = [] if state is None else state.worker_states
        then = sum(isinstance(one, SavableDatasetCheckpoint) for one in states)  # in a worker
        now = self.worker_config.num_workers
        if state is not None and then != now:
            raise ValueError(
                f"the state is of {then} loader workers, and now there are {now}; resume with as "
                "many as before"
            )
        super().restore_state_rank(state)

    def deal_anew(self, states: Sequence[SavableDataLoaderState | None]) -> None:
        """Restore the states that all ranks of another number, or with another number of workers,
        saved after the same step: what they left of an epoch is dealt among the present workers,
        so that each pack still comes once per epoch. Raises ValueError where that cannot be."""
        self.restore_state_rank(deal_anew(states, self.worker_config))

    def close(self) -> None:
        """End the workers. Left to the garbage collector, each of them takes 5 s."""
        workers = _running(self)
        self._iterator = self._epoch_iterator = None
        if workers is not None:
            workers._shutdown_workers()


def _running(loader: SavableDataLoader[Any]) -> Any:
    """The iterator that drives the loader's workers (torch has no public name for it), or None."""
    return vars(loader).get("_iterator")


def _begin_pass(state: Any) -> None:
    """Turn a dataset's state at the end of a pass into one at the beginning of the next."""
    if state["__class__"] == OnePass.__name__:
        state["_is_over"] = False
    else:
        for inner in state["datasets"]:
            _begin_pass(inner)


def deal_anew(
    states: Sequence[SavableDataLoaderState | None], now: WorkerConfig
) -> SavableDataLoaderState | None:
    """The state from which a rank reads its part of the packs that are left.

    Args:
        states: of all ranks, after the same step.

    Returns:
        None: nothing was read yet.

    Raises:
        ValueError: something in the datasets' state belongs to the workers that there were.
    """
    known = [state for state in states if state is not None]
    if not known:
        return None
    per_rank = len(known[0].worker_states)
    workers = [
        _of_dataset(worker)
        for state in states
        for worker in (state.worker_states if state else [None] * per_rank)
    ]
    if not any(workers):
        return None
    merged = _merge(workers, len(states), per_rank)
    if not now.num_workers:
        own: list[Any] = [
            FlexState(__class__="SimpleSavableDatasetWrapper", datasets=[merged], _sample_index=0)
        ]
    else:
        own = [_begin(merged, now.worker_seed(number)) for number in range(now.num_workers)]
    return SavableDataLoaderState(
        worker_states=own, next_worker_id=0, micro_batch_size=known[0].micro_batch_size
    )


def _begin(merged: FlexState, seed: int) -> SavableDatasetCheckpoint:
    """The merged state for one worker, with generators of its own."""
    present = SystemRng.save_state()
    SystemRng.seed(seed)
    state = SavableDatasetState(rng=SystemRng.save_state(), dataset_state=merged, sample_index=0)
    SystemRng.restore_state(present)
    return SavableDatasetCheckpoint(state=state, offset=0)


def _of_dataset(worker: Any) -> FlexState | None:
    """State of the dataset in a worker's; None if it has yet to begin."""
    if not isinstance(worker, SavableDatasetCheckpoint):  # without loader processes
        return None if worker is None else worker["datasets"][0]
    if worker.offset:
        raise ValueError("the state is from before the last batch; take it of a PackedLoader")
    return None if worker.state is None else worker.state.dataset_state


def _merge(workers: Sequence[FlexState | None], ranks: int, per_rank: int) -> FlexState:
    """One state for every new worker, from those of all earlier ones at the same dataset."""
    begun = [state for state in workers if state is not None]
    merged, name = FlexState(begun[0]), begun[0]["__class__"]
    if name == DealtPacks.__name__:
        read = [(state["_epoch"], state["_index"]) if state else (0, 0) for state in workers]
        earlier = [*json.loads(merged["_earlier"]), [ranks, per_rank, read]]
        first = min(epoch for epoch, _ in read)
        new = {"_epoch": first, "_index": 0, "_is_over": False, "_earlier": json.dumps(earlier)}
        return FlexState({**merged, **new})
    if "datasets" not in merged:
        raise ValueError(
            f"packs read through {name} cannot be dealt anew; resume with the same number of ranks "
            "and data.num_workers"
        )
    if name == OnePass.__name__:
        merged["_is_over"] = all(state["_is_over"] for state in begun)
    elif name == RepeatDataset.__name__:
        merged["_repetition"] = min(begun, key=_progress)["_repetition"]
        merged["_index"] = 0
    elif name == BlendDataset.__name__:
        columns = zip(*(state["exhausted"] for state in begun), strict=True)
        merged["exhausted"] = [all(column) for column in columns]
        merged["_worker_rng"] = FlexState(rng=None)  # begins with each worker's own seed
    merged["datasets"] = [
        _merge([state and state["datasets"][number] for state in workers], ranks, per_rank)
        for number in range(len(merged["datasets"]))
    ]
    return merged


def _progress(state: FlexState) -> tuple[int, bool]:
    """Progress of a worker: its epoch, and whether that is over."""
    while "datasets" in state:
        state = state["datasets"][0]
    return state["_epoch"], state["_is_over"]
