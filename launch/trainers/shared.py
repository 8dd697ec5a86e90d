"""Parts that several integrations share: packs opened as they were measured, and as a dataset; a
warning if ranks would wait for each other forever; a check for kernels that take the boundaries;
and resuming with the weights that were saved."""

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import distributed
from torch.utils.data import Dataset

from launch.data.packed_data import read_packed_data
from task_encoders.families import FAMILIES, change_options, family_of_processor, model_options
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.media.patches import PixelTransport
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.storage.paths import path_of

logger = logging.getLogger(__name__)


def open_as_measured(
    path: str | Path,
    trainer: str,
    *,
    split: str = "train",
    processor: str | None = None,
    pixel_transport: PixelTransport = "float32",
    trees: bool = False,
) -> tuple[PackedFolder, PackedTaskEncoder]:
    """Open the packs at a path, with the task encoder that their manifest describes. Packs written
    by others have no manifest: they get the defaults of the processor's family.

    Args:
        trainer: the name of a trainer whose loss takes only weights 0 and 1.
        processor: the model's folder or hub name; default: the processor that measured the packs.
            It may be of another family with the same lengths, which then decides the positions.
        pixel_transport: "uint8" if `pixel_kwargs` or `normalise_pixels` follows on the device.
        trees: the trainer also takes packs whose samples share prefixes (`TrainsPacks` does).

    Raises:
        PackedFolderError: the split does not exist or is empty.
        PackingSettingsError: the environment or the processor contradict the packs, or packs have
            other weights.
    """
    given = {"processor": processor, "family": family_of_processor(processor)} if processor else {}
    folder = path_of(path)
    if folder.is_dir() and not (folder / "manifest.json").is_file():
        measured: dict[str, Any] = {"seq_length": 2048, "model": model_options(**given)}
    else:
        data = read_packed_data(folder)
        measured = {"seq_length": data.seq_length, "model": change_options(data.model, **given)}
        measured["trees"] = trees and data.has_trees
    task_encoder = PackedTaskEncoder(pixel_transport=pixel_transport, **measured)
    task_encoder.check_trainer(trainer)
    return PackedFolder(path, task_encoder, split=split), task_encoder


class PacksAsItems(Dataset[Any]):
    """Packs of a folder as items of a framework's own loader. Arguments and errors are those of
    `open_as_measured`."""

    def __init__(self, path: str | Path, trainer: str, **options: Any) -> None:
        self.packs, task_encoder = open_as_measured(path, trainer, **options)
        self.seq_length, self.family = task_encoder.seq_length, task_encoder.model.family
        self.token_ids = task_encoder.encoder.media_token_ids

    def __len__(self) -> int:
        return len(self.packs)


def warn_of_mixed_steps(packs: Any, num_ranks: int, packs_per_row: int = 1) -> None:
    """Warn, on the first rank, if some ranks will have images at a step and others none: if they
    share a vision tower (FSDP, ZeRO-3), some then wait for the others forever.

    Args:
        packs: a `PackedFolder`, whose packs the ranks take in turn; other packs are not checked.
        packs_per_row: packs that a rank takes at a time (`dealt_in_rows`).
    """
    if distributed.is_initialized() and distributed.get_rank():
        return
    columns = packs.columns() if hasattr(packs, "columns") and num_ranks > 1 else None
    if columns is None or len(np.unique(columns.media)) < 2:
        return
    planned_for: int = packs.uniform_ranks
    if planned_for == 0 or planned_for % num_ranks:
        remedy = f"pack with pack.order={{num_ranks: {num_ranks}, uniform: true}}"
    elif len(packs) % (num_ranks * packs_per_row):
        remedy = f"the last of {len(packs)} packs fill no step: let a rank take 1 at a time"
    else:
        return
    logger.warning(
        "%s has packs with and without images, which meet at a step of %d ranks; a vision tower "
        "that these share (FSDP, ZeRO-3) hangs there: %s",
        packs.path,
        num_ranks,
        remedy,
    )


def require_kernels(family: str, trainer: str, *modules: str) -> None:
    """Check that a trainer has the only kernels with which it keeps samples apart in recurrent
    layers. Raises ValueError if the family has such layers, and a module cannot be imported."""
    for module in modules if FAMILIES[family].is_recurrent else ():
        try:
            importlib.import_module(module)
        except Exception as error:  # fla raises errors of other types without a driver
            package = "flash-linear-attention" if module.startswith("fla.") else "causal-conv1d"
            raise ValueError(
                f"{trainer} keeps samples of a pack apart in the recurrent layers of {family} only "
                f"by {module}, which cannot be imported; install {package}"
            ) from error


def by_saved_names(load: Callable[..., None]) -> Callable[..., None]:
    """Make `Trainer._load_from_checkpoint` load models whose weights have other names when saved,
    such as Qwen2-VL's and Qwen2.5-VL's: it would continue with the weights it began with."""
    from transformers import PreTrainedModel

    def mended(trainer: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        target = trainer.model if model is None else model
        if trainer.is_fsdp_enabled or not isinstance(target, PreTrainedModel):
            load(trainer, resume_from_checkpoint, model)
        else:
            saved = type(target).from_pretrained(resume_from_checkpoint, dtype=target.dtype)
            target.load_state_dict(saved.state_dict())

    return mended
