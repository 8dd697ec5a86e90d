"""States of Energon's loader, of all ranks, as one with which other ranks or workers go on."""

import json
from collections.abc import Sequence
from typing import Any

from megatron.energon.rng import SystemRng
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.state import FlexState
from megatron.energon.worker import WorkerConfig
from megatron.energon.wrappers import BlendDataset, RepeatDataset

from task_encoders.rows.pack_dealing import DealtPacks, OnePass


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
