"""Packs by their numbers, encoded as they were measured: for trainers that want `len` and `[i]`."""

from pathlib import Path
from typing import Any

from launch.data.packed_data import read_packed_data
from task_encoders.families import ModelOptions, change_options, family_of_processor, model_options
from task_encoders.loading.folder_shards import PackedFolderError
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.media.patches import PixelTransport
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.storage.paths import path_of


def settings_of_packs(path: str | Path, **options: Any) -> tuple[ModelOptions, int, bool]:
    """Return the model's settings and seq_length of packs, and whether samples share prefixes, as
    their manifest says, except for options that are not None. Packs written by others have no
    manifest: the rest is the family's defaults."""
    given = {name: value for name, value in options.items() if value is not None}
    folder = path_of(path)
    seq_length = given.pop("seq_length", None)
    if folder.is_dir() and not (folder / "manifest.json").is_file():
        return model_options(**given), seq_length or 2048, False
    data = read_packed_data(folder)
    return change_options(data.model, **given), seq_length or data.seq_length, data.has_trees


def open_as_measured(
    path: str | Path,
    trainer: str,
    *,
    split: str = "train",
    processor: str | None = None,
    pixel_transport: PixelTransport = "float32",
    trees: bool = False,
) -> tuple[PackedFolder, PackedTaskEncoder]:
    """The packs at a path of a `PackedFolder`, with the task encoder that their manifest describes.

    Args:
        trainer: the name of a trainer whose loss takes only weights 0 and 1.
        processor: the model's folder or hub name, instead of the one that measured the packs.
            Another family with the same lengths may be given; positions are then its own.
        pixel_transport: "uint8" where `pixel_kwargs` or `normalise_pixels` follows on the device.
        trees: the trainer takes packs whose samples share prefixes, too (`TrainsPacks` does).

    Raises:
        PackedFolderError: there is no such split, or it is empty.
        PackingSettingsError: the environment or the processor contradict the packs, or packs have
            other weights.
    """
    family = family_of_processor(processor) if processor else None
    settings, seq_length, shared = settings_of_packs(path, processor=processor, family=family)
    task_encoder = PackedTaskEncoder(
        seq_length=seq_length,
        model=settings,
        pixel_transport=pixel_transport,
        trees=trees and shared,
    )
    task_encoder.check_trainer(trainer)
    packs = PackedFolder(path, task_encoder, split=split)
    if not len(packs):
        raise PackedFolderError(
            f"{path} has no packs in its {split} split; pack with output.split={{{split}: 0.01, …}}"
        )
    return packs, task_encoder
