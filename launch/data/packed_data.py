"""Number of packs and the settings they were measured with, as their manifests say.

The steps of an epoch and the batch size follow from them. The unit of a recipe is the sample: with
n samples per pack, a step of G samples takes G / n packs. This preserves the recipe: on average,
each step sees the same number of tokens and samples as without packing.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.config import LaunchConfig, ValidationConfig
from offline_packing.errors import StageError
from offline_packing.online.ranks.pack_costs import longest_pack
from offline_packing.storage.files import hash_bytes
from task_encoders.families import ModelOptions, model_options
from task_encoders.loading.folder_shards import PackedFolderError, load_datasets, no_packs
from task_encoders.packs.manifest import Manifest, ManifestError, read_manifest
from task_encoders.storage.paths import check_exists, is_url, path_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedData:
    """A packed folder, or a blend of several, as its manifests describe it."""

    #: packs in the train split; in a blend, in all its datasets, as often as these are repeated
    num_packs: int
    #: samples per pack as drawn: in a blend, weighted by each dataset's share of the packs
    samples_per_pack: float
    #: seq_length of the longest packs
    seq_length: int
    #: the settings that the samples were measured with
    model: ModelOptions
    #: a hash that changes with the content of any dataset
    content_hash: str
    #: packs in the val split
    num_val_packs: int = 0
    #: the task of each dataset
    tasks: tuple[str, ...] = ()
    #: the datasets of a blend: folder, packs, share of the packs drawn
    blended: tuple[tuple[Any, int, float], ...] = ()
    #: whether any pack has images or videos; True if the manifests do not say
    has_media: bool = True
    #: number of ranks that a folder's packs are ordered for (pack.order)
    ordered_for: int | None = None
    #: whether samples share prefixes (pack.share_prefixes)
    has_trees: bool = False
    #: content_hash of each dataset, by its absolute path
    datasets: Mapping[str, str] = field(default_factory=dict)
    #: whether shares of sources change over the packs of any dataset (pack.mixture)
    has_mixture: bool = False


def read_packed_data(path: str | Path) -> PackedData:
    """Read the manifest of a folder, or the manifests of a metadataset YAML, here or at a URL.
    Raises StageError if a folder has no manifest, or datasets were measured differently."""
    folders, weights, repetitions = zip(*_folders(path), strict=True)
    manifests = [_read_manifest(folder) for folder in folders]
    models = [model_options(**manifest.config["model"]) for manifest in manifests]
    _require_one_model(path, folders, models)
    packs = [manifest.total("packs") for manifest in manifests]
    samples = [manifest.total("samples") for manifest in manifests]
    pairs = zip(packs, repetitions, strict=True)
    epoch = [number * (1 if times is None else times) for number, times in pairs]
    drawn = epoch if None in weights else weights
    if not sum(drawn):
        raise StageError(str(no_packs(path, "train")))
    shares = [one / sum(drawn) for one in drawn]
    hashes = [manifest.content_hash for manifest in manifests]
    weighted, is_blend = [*zip(hashes, shares, strict=True)], len(folders) > 1
    order = manifests[0].config.get("pack", {}).get("order")
    shards = [shard for manifest in manifests for shard in manifest.shards]
    return PackedData(
        num_packs=sum(map(round, epoch)),
        samples_per_pack=sum(w * s / p for w, s, p in zip(shares, samples, packs, strict=True)),
        seq_length=max(manifest.seq_length for manifest in manifests),
        model=models[0],
        content_hash=hash_bytes(repr(weighted).encode()) if is_blend else hashes[0],
        num_val_packs=sum(manifest.total("packs", "val") for manifest in manifests),
        tasks=tuple(manifest.task for manifest in manifests),
        blended=tuple(zip(folders, packs, shares, strict=True)) if is_blend else (),
        has_media=any(
            not shard.media or shard.media.strip("0") for shard in shards if shard.split == "train"
        ),
        ordered_for=int(order["num_ranks"]) if order and not is_blend else None,
        has_trees=any(manifest.version == 2 for manifest in manifests),
        datasets=dict(zip(map(absolute, folders), hashes, strict=True)),
        has_mixture=any(manifest.has_mixture for manifest in manifests),
    )


def absolute(path: str | Path) -> str:
    """Make a path absolute, and leave a URL as it is."""
    return str(path) if is_url(path) else os.path.abspath(path)


def largest_of(paths: Sequence[str], data: Sequence[PackedData]) -> PackedData:
    """Join the packs of all stages of a run: the largest of each measure. Raises StageError if
    stages were measured differently."""
    _require_one_model("data.path", paths, [one.model for one in data])
    return replace(
        data[0],
        tasks=tuple(task for one in data for task in one.tasks),
        seq_length=max(one.seq_length for one in data),
        has_media=any(one.has_media for one in data),
        has_trees=any(one.has_trees for one in data),
    )


def _require_one_model(
    path: str | Path, folders: Sequence[Any], models: Sequence[ModelOptions]
) -> None:
    for folder, model in zip(folders, models, strict=True):
        for name, value in model:
            first = getattr(models[0], name, None)
            if value != first:
                raise StageError(
                    f"{path}: {folders[0]} was measured with {name} {first!r}, {folder} with "
                    f"{value!r}; pack both with the same"
                )


def check_room(path: str | Path, context_parallel: int) -> None:
    """Check that packs have room for the padding of `parallel.context`, planned or by chance.
    Raises StageError if some packs lack room, or their folder does not tell."""
    if context_parallel == 1:
        return
    from task_encoders.model_inputs import required_pad_multiple  # imports torch

    multiple = required_pad_multiple(context_parallel=context_parallel)
    for folder, *_ in _folders(path):
        manifest = _read_manifest(folder)
        if manifest.is_padded_to(multiple):
            continue
        head = f"parallel.context={context_parallel} pads samples to multiples of {multiple}"
        remedy = f"pack it with pack.context_parallel={context_parallel}"
        try:
            longest = longest_pack(folder, multiple)
        except StageError as error:
            raise StageError(f"{head}; {error}; {remedy}") from error
        if longest > manifest.seq_length:
            raise StageError(
                f"{head}, so that packs of {folder} would take up to {longest} tokens > seq_length "
                f"{manifest.seq_length}; {remedy}"
            )


def settle_validation(config: LaunchConfig, overrides: Sequence[str]) -> LaunchConfig:
    """Check that there are packs to validate on. Without them, turn off validation that a file asks
    for, and no override does; otherwise raise StageError."""
    for path in config.data.paths if config.validation.every else ():
        if _shards_of(path, "val"):
            continue
        if any(one.startswith("validation") for one in overrides):
            raise StageError(f"{no_packs(path, 'val')}; or set validation.every=0")
        logger.warning("validation is off: %s", no_packs(path, "val"))
        return config.model_copy(update={"validation": ValidationConfig()})
    return config


def warn_of_trained(path: str) -> None:
    """Warn if packs to validate on are also trained on."""
    if shared := _shards_of(path, "val") & _shards_of(path, "train"):
        where, shard = min(shared)
        logger.warning(
            "%s: packs are in both the train and the val split, such as %s of %s; give the val "
            "split other packs",
            *(path, shard, where),
        )


def _read_manifest(folder: Path) -> Manifest:
    try:
        manifest = read_manifest(folder)
    except ManifestError as error:
        raise StageError(str(error)) from error
    if manifest is None:
        raise StageError(
            f"{folder} has no manifest.json; write it with offline-packing, or wait until that is "
            "finished"
        )
    if manifest.layout.startswith("llava_onevision"):
        raise StageError(
            f"{folder} has output.layout={manifest.layout}, which other trainers read; pack it "
            "with output.layout=energon"
        )
    if not manifest.total("packs"):
        raise StageError(str(no_packs(folder, "train")))
    return manifest


def _folders(path: str | Path) -> list[tuple[Path, float | None, float | None]]:
    """Return (folder, weight per pack, repetitions per epoch) of a folder, or of each folder of a
    metadataset, as Energon resolves it; at most one is given. Raises StageError."""
    check_exists(folder := path_of(path))
    if folder.is_dir():
        return [(folder, None, None)]
    if not folder.is_file():
        raise StageError(
            f"{path} is neither a packed folder nor a metadataset YAML; set data.path to one"
        )
    try:
        entries = load_datasets(folder, "train")
    except PackedFolderError as error:
        raise StageError(f"{error}; a path in it is a folder with .nv-meta") from error
    return [(path_of(one.dataset.path), one.weight, one.repetitions) for one in entries]


def _shards_of(path: str | Path, split: str) -> set[tuple[str, str]]:
    """Return (folder, shard) of all shards of a split; empty if there is no such split."""
    folder = path_of(path)
    if folder.is_dir():
        shards = _read_manifest(folder).shards
        return {(str(folder), shard.name) for shard in shards if shard.split == split}
    try:
        entries = load_datasets(folder, split)
    except PackedFolderError:  # other errors were raised for the train split
        return set()
    files = ((e.dataset, getattr(e.dataset, "split_part_files", [""])) for e in entries)
    return {(str(dataset.path), file) for dataset, names in files for file in names}
