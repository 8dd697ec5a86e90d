"""Packs from a loader to the ranks, with a state that can be saved.

Among the ranks that train on the same rows (tensor and context parallel ones), the first reads and
sends each row to the others. So there is one loader per data parallel rank, and no pack is decoded
twice.
"""

import logging
import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch
from megatron.core import parallel_state
from megatron.energon import WorkerConfig

from launch.config import DataConfig
from launch.data.balanced_loader import BalancedLoader
from launch.data.broadcast import broadcast_batch
from launch.data.indexed_loader import FolderRows, IndexedLoader, leave_group
from launch.data.loader_state import from_plain, to_plain
from launch.data.packed_data import PackedData, slot_ranks_of
from launch.data.slot_loader import SlotLoader
from offline_packing.online.energon import OnlineTaskEncoder, get_online_train_dataset
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import change_options
from task_encoders.loading.indexed_dataset import IndexedPackDataset
from task_encoders.loading.packed_dataset import (
    PackedLoader,
    get_packed_loader,
    get_packed_train_dataset,
    get_packed_val_dataset,
)
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import pad_batch
from task_encoders.packed_task_encoder import PackedTaskEncoder

logger = logging.getLogger(__name__)

#: Seconds without a row after which Energon's loader reports a hang. The first comes late: workers
#: build the tokenizer and seek in the shards.
FIRST_ROW_TIMEOUT: Final = 600
ROW_TIMEOUT: Final = 120


class MicroBatches(Protocol):
    """Source of a trainer's rows."""

    def next(self) -> PackedBatch | None:
        """The next row; at the end of the data None, and None again from then on."""

    def state(self) -> Any:
        """State that `restore` needs to continue with the next row: tensors, numbers, mappings."""

    def restore(self, state: Any) -> None:
        """Resume where `state` was taken. Only before the first `next`."""

    def deal_anew(self, states: Sequence[Any]) -> None:
        """Resume where all ranks, of another number or with other loader processes, took theirs:
        what they left of the epoch is dealt among the present ranks."""

    def close(self) -> None:
        """Stop reading. `next` must not be called afterwards."""


def build_task_encoder(
    config: DataConfig, data: PackedData, family: str | None = None, *, pad_multiple: int = 1
) -> PackedTaskEncoder:
    """The task encoder with the settings that the packs were measured with.

    Args:
        family: of the model that is trained (default: as measured). Lengths are the same in both
            families; the positions of videos are not.
        pad_multiple: of each sub-sample's tokens; packs have room for it, see `check_room`.
    """
    model = change_options(data.model, family=family, processor=config.processor)
    kind = PackedTaskEncoder if config.online is None else OnlineTaskEncoder
    if config.task_encoder is not None:
        own = _load_class(config.task_encoder)
        if not issubclass(own, kind):
            raise ValueError(f"data.task_encoder {config.task_encoder!r} is no {kind.__name__}")
        kind = own
    padding: dict[str, Any] = (
        {"pad_multiple": pad_multiple, "fits_padded": True} if pad_multiple > 1 else {}
    )
    return kind(
        seq_length=data.seq_length,
        **padding,
        pad_to_seq_length=config.pad_to_seq_length,
        cross_sample_attention=config.cross_sample_attention,
        pixel_transport=config.pixel_transport,
        encode_threads=config.encode_threads,
        model=model,
    )


def _load_class(name: str) -> type[PackedTaskEncoder]:
    try:
        found: type[PackedTaskEncoder] = pkgutil.resolve_name(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(f"data.task_encoder {name!r}: {error}; name a 'module:Class'") from error
    return found


class EnergonMicroBatches:
    """`MicroBatches` from a packed folder, a blend, or packs as token ids.

    Args:
        split: "train" repeats as `config.repeat` says; "val" reads every pack once per `restart`.
        limit: micro batches per rank and pass, for "val".
        seed: of every order that is drawn.
    """

    def __init__(
        self,
        config: DataConfig,
        task_encoder: PackedTaskEncoder,
        device: torch.device,
        *,
        split: str = "train",
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        self._device = device
        self._pad_token_id = task_encoder.encoder.pad_token_id
        self._row_length = config.micro_batch_size * task_encoder.seq_length
        self._pads = config.pad_to_length
        if self._pads and self._row_length % task_encoder.pad_multiple:
            raise ValueError(
                f"data.pad_to_length: {self._row_length} tokens are not a multiple of "
                f"{task_encoder.pad_multiple}, as parallel.context needs; set it to false"
            )
        self._ended = False
        self._iterator: Any = None
        self._loader: Any = None
        self._group = parallel_state.get_tensor_and_context_parallel_group()
        if parallel_state.get_tensor_and_context_parallel_rank() == 0:
            self._loader = _build_loader(config, task_encoder, split, limit, seed, device)

    def next(self) -> PackedBatch | None:
        batch = None
        if self._loader is not None and not self._ended:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            batch = next(self._iterator, None)
            self._ended = batch is None
        if batch is not None:
            for line in batch.dropped:
                logger.warning("left out, in pack %s or before: %s", ", ".join(batch.__key__), line)
            if self._pads:
                batch = pad_batch(batch, self._row_length, self._pad_token_id)
        return broadcast_batch(batch, self._device, self._group)

    def restart(self) -> None:
        """Begin another pass."""
        self._ended, self._iterator = False, None

    def state(self) -> Any:
        if self._loader is None:
            return None
        return {"ended": self._ended, "loader": to_plain(self._loader.save_state_rank())}

    def restore(self, state: Any) -> None:
        if self._loader is not None:
            self._ended = state["ended"]
            self._loader.restore_state_rank(from_plain(state["loader"]))

    def deal_anew(self, states: Sequence[Any]) -> None:
        if self._loader is not None:
            self._ended = all(state["ended"] for state in states)
            self._loader.deal_anew([from_plain(state["loader"]) for state in states])

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()


def _build_loader(
    config: DataConfig,
    task_encoder: PackedTaskEncoder,
    split: str,
    limit: int | None,
    seed: int,
    device: torch.device,
) -> Any:
    ranks: dict[str, Any] = {
        "rank": parallel_state.get_data_parallel_rank(),
        "world_size": parallel_state.get_data_parallel_world_size(),
        "num_workers": config.num_workers,
    }
    size: dict[str, Any] = {"micro_batch_size": config.micro_batch_size}
    repeat = config.repeat and split == "train"
    passes: dict[str, Any] = {"repeat": repeat, "timeout": FIRST_ROW_TIMEOUT}
    packs: PackedFolder | IndexedPackDataset | None = None
    if config.data_prefix is not None:
        prefix = config.data_prefix if split == "train" else f"{config.data_prefix}_{split}"
        packs = IndexedPackDataset(prefix, task_encoder)
    elif (slot_ranks := slot_ranks_of(config.path)) > 1:
        slots = PackedFolder(config.path, task_encoder, split=split)
        return SlotLoader(slots, slot_ranks, device, limit=limit, **passes, **ranks)
    elif config.order == "interleaved":
        packs = PackedFolder(config.path, task_encoder, split=split)
    if packs is not None:
        rows = FolderRows(packs, config.micro_batch_size, ranks["world_size"])
        return IndexedLoader(rows, limit=limit, **passes, **ranks)
    if split == "train" and config.order == "balanced":
        return BalancedLoader(config.path, task_encoder, seed=seed, **passes, **size, **ranks)
    options: dict[str, Any] = {"worker_config": WorkerConfig(**ranks, seed_offset=seed)}
    if split == "val":
        options |= {"limit": limit, **size}
        return _open_loader(get_packed_val_dataset, config.path, task_encoder, **options)
    return _energon_loader(config, task_encoder, seed, repeat=repeat, **options)


def _energon_loader(
    config: DataConfig, task_encoder: PackedTaskEncoder, seed: int, **options: Any
) -> Any:
    """The loader of the train split in the order written."""
    get_dataset: Callable[..., Any] = get_packed_train_dataset
    if config.online is not None:
        windows = config.online.model_dump(include={"buffer", "strategy", "budgets"})
        get_dataset = partial(get_online_train_dataset, seed=seed, **windows)
    options["micro_batch_size"] = config.micro_batch_size
    return _open_loader(get_dataset, config.path, task_encoder, **options)


def _open_loader(
    get_dataset: Callable[..., Any],
    path: str,
    task_encoder: PackedTaskEncoder,
    **options: Any,
) -> PackedLoader:
    loader = get_packed_loader(
        get_dataset(path, task_encoder, **options),
        watchdog_timeout_seconds=ROW_TIMEOUT,
        watchdog_initial_timeout_seconds=FIRST_ROW_TIMEOUT,
    )
    loader.worker_init_fn = partial(_init_worker, loader.worker_init_fn)
    loader.generator = torch.Generator()  # as in IndexedLoader
    return loader


def _init_worker(energon_init: Callable[[int], None], worker_id: int) -> None:
    leave_group(worker_id)
    energon_init(worker_id)
