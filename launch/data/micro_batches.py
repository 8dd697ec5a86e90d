"""Rows from a loader to the ranks, with a state that can be saved.

Among the ranks that train on the same rows (tensor and context parallel ranks), the first reads
each row and sends it to the others. So there is one loader per data parallel rank, and no pack is
decoded twice. A schedule says which packs each rank reads (`task_encoders.loading.schedule`); data
that are packed while training come through Energon's loader.
"""

import itertools
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.energon import WorkerConfig

from launch.config import DataConfig
from launch.data.broadcast import EvenRows, broadcast_batch
from launch.data.packed_data import PackedData
from offline_packing.errors import StageError
from offline_packing.online.energon import OnlineTaskEncoder, get_online_train_dataset
from offline_packing.online.ranks.pack_costs import schedule_of
from task_encoders.energon_samples import PackedBatch, empty_batch
from task_encoders.families import FAMILIES, change_options
from task_encoders.loading.packed_dataset import PackedLoader, get_packed_loader
from task_encoders.loading.packed_folder import PackedFolder, RawPack
from task_encoders.loading.schedule import ScheduledLoader
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.samples import SampleError

logger = logging.getLogger(__name__)

#: Seconds without a first row, for which workers build the tokenizer and seek in the shards, and
#: without a later row, after which a loader counts as hung. Torch's loader has one limit for both.
FIRST_ROW_TIMEOUT: Final = 600
ROW_TIMEOUT: Final = 120
#: Consecutive rows without a usable pack after which a run ends, as Energon's loader does.
MOST_LEFT_OUT: Final = 100


def build_task_encoder(
    config: DataConfig,
    data: PackedData,
    family: str | None = None,
    *,
    pad_multiple: int = 1,
    trees: bool = False,
) -> PackedTaskEncoder:
    """Build the task encoder with the settings that the packs were measured with.

    Args:
        family: the family of the model that is trained (default: as measured). Lengths are the same
            in both families; the positions of videos are not.
        pad_multiple: divisor of each sub-sample's tokens; packs have room for it, see `check_room`.
        trees: the model's attention knows prefix trees.
    """
    model = change_options(data.model, family=family, processor=config.processor)
    kind = PackedTaskEncoder if config.online is None else OnlineTaskEncoder
    if config.task_encoder is not None:
        try:
            own: Any = pkgutil.resolve_name(config.task_encoder)
        except (ValueError, ImportError, AttributeError) as error:
            raise ValueError(
                f"data.task_encoder {config.task_encoder!r}: {error}; name a 'module:Class'"
            ) from error
        if not issubclass(own, kind):
            raise ValueError(
                f"data.task_encoder {config.task_encoder!r} is not a subclass of {kind.__name__}"
            )
        kind = own
    given: dict[str, Any] = {"trees": True} if trees else {}  # a user's own class may lack it
    if pad_multiple > 1:
        given |= {"pad_multiple": pad_multiple, "fits_padded": True}
    return kind(
        seq_length=data.seq_length,
        **given,
        cross_sample_attention=config.cross_sample_attention,
        pixel_transport="uint8",
        encode_threads=config.encode_threads,
        model=model,
    )


class MicroBatches:
    """A rank's rows from a packed folder, a blend, or data that are packed while training.

    Args:
        split: "train" repeats as `config.repeat` says; "val" reads every pack once per `restart`.
        limit: micro batches per rank and pass, for "val".
        seed: the seed of every order that is drawn.
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
        #: pads rows for models whose ranks run the same layers together
        self.even: EvenRows | None = None
        self._device = device
        self._repeats = config.repeat and split == "train"
        self._left_out = 0
        self._loader: Any = None
        self._group = parallel_state.get_tensor_and_context_parallel_group()
        if parallel_state.get_tensor_and_context_parallel_rank() == 0:
            self._loader = build_loader(config, task_encoder, split, limit, seed)
        self.restart()

    def restart(self) -> None:
        """Begin another pass."""
        loaders = [] if self._loader is None else [self._loader]
        epochs = itertools.cycle(loaders) if self._repeats else loaders
        self._rows: Iterator[Any] = itertools.chain.from_iterable(epochs)
        self._ended = False

    def next(self) -> PackedBatch | None:
        """Return the next row; at the end of the data None, and None again from then on."""
        batch = None if self._ended else next(self._rows, None)
        self._ended = batch is None
        if batch is not None:
            for line in batch.dropped:
                logger.warning("left out, in pack %s or before: %s", ", ".join(batch.__key__), line)
            self._left_out = 0 if batch.num_tokens else self._left_out + 1
            if self._left_out == MOST_LEFT_OUT:
                raise StageError(
                    f"{MOST_LEFT_OUT} consecutive rows have no usable sample: {batch.dropped[-1]}"
                )
        row = broadcast_batch(batch, self._device, self._group)
        return row if self.even is None else self.even(row)

    def state(self) -> Any:
        """Return the state that `restore` needs to continue with the next row."""
        if self._loader is None:
            return None
        is_online = isinstance(self._loader, PackedLoader)
        save = self._loader.save_state_rank if is_online else self._loader.state_dict
        return {"ended": self._ended, "loader": save()}

    def restore(self, state: Any) -> None:
        """Resume where `state` was taken on the same rank, or on rank 0 of another number of ranks:
        the rest of the epoch is dealt among the present ranks. Only before the first `next`."""
        if self._loader is not None:
            self._ended, loader = state["ended"], self._loader
            is_online = isinstance(loader, PackedLoader)
            load = loader.restore_state_rank if is_online else loader.load_state_dict
            load(state["loader"])

    def close(self) -> None:
        """Stop reading. `next` must not be called afterwards."""
        if self._loader is not None:
            self._loader.close()


def build_loader(
    config: DataConfig, task_encoder: PackedTaskEncoder, split: str, limit: int | None, seed: int
) -> ScheduledLoader | PackedLoader:
    """Build the loader of this data parallel rank's rows: of packs; or by Energon, of samples that
    are packed while training."""
    rank = parallel_state.get_data_parallel_rank()
    num_ranks = parallel_state.get_data_parallel_world_size()
    repeat, num_workers = config.repeat and split == "train", config.num_workers
    (path,) = config.paths
    if config.online is None:
        folder = PackedFolder(path, task_encoder, split=split)
        schedule = schedule_of(
            folder,
            order=config.order if split == "train" else "written",
            num_ranks=num_ranks,
            packs_per_row=config.micro_batch_size,
            seed=seed,
            repeat=repeat,
        )
        return ScheduledLoader(
            folder,
            schedule,
            rank,
            partial(_collate, folder),
            limit=limit,
            num_workers=num_workers,
            timeout=FIRST_ROW_TIMEOUT if num_workers else 0,
            pin_memory=torch.cuda.is_available(),  # from there rows are sent without waiting
            worker_init_fn=leave_group,
        )
    assert split == "train", "LaunchConfig refuses to validate on them"
    dataset = get_online_train_dataset(
        path,
        task_encoder,
        micro_batch_size=config.micro_batch_size,
        seed=seed,
        repeat=repeat,
        worker_config=WorkerConfig(
            rank=rank, world_size=num_ranks, num_workers=num_workers, seed_offset=seed
        ),
        **config.online.model_dump(include={"buffer", "strategy", "budgets"}),
    )
    loader = get_packed_loader(
        dataset,
        watchdog_timeout_seconds=ROW_TIMEOUT,
        watchdog_initial_timeout_seconds=FIRST_ROW_TIMEOUT,
    )
    loader.worker_init_fn = partial(leave_group, begin=loader.worker_init_fn)
    loader.generator = torch.Generator()  # as in ScheduledLoader
    return loader


def _collate(folder: PackedFolder, packs: Sequence[RawPack]) -> PackedBatch:
    """Collate packs to a row; to a row of padding if they have no usable sub-sample, so that ranks
    keep in step."""
    try:
        return folder.collate(packs)
    except SampleError as error:
        encoder, keys = folder.task_encoder, [pack.key for pack in packs]
        assert encoder is not None
        return empty_batch(
            FAMILIES[encoder.model.family].build.POSITION_ROWS,
            encoder.pad_multiple,
            keys=keys,
            dropped=[f"{', '.join(keys)}: {error}"],
        )


def leave_group(worker_id: int, begin: Callable[[int], None] | None = None) -> None:
    """Leave the trainer's process group, then begin as the loader asks. Torchrun sends SIGTERM to
    the whole group, and a trainer that has to save must not find its loader dead. A worker always
    ends with its trainer. Its warnings are of rows that no other rank reads."""
    os.setpgid(0, 0)
    logging.getLogger("task_encoders.rows").setLevel(logging.WARNING)
    if begin is not None:
        begin(worker_id)
