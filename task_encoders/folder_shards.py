"""Which shards a split of a packed folder or a metadataset has, and where their packs begin.

A folder's own metadata are read here; whatever refers to other datasets is Energon's to resolve.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import yaml

from task_encoders.pack_format import METADATASET

logger = logging.getLogger(__name__)

#: Twenty times as fast, where PyYAML was built with it.
_YAML_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class PackedFolderError(ValueError):
    """A folder whose packs cannot be found, or read."""


class Shard(NamedTuple):
    """The packs [start, end) of one tar, or of one file of references."""

    path: Path
    subflavors: Mapping[str, Any]
    start: int
    end: int
    #: where references find their media: Energon's auxiliary datasets by name; None: in the tar
    stores: Mapping[str, Any] | None = None


def find_shards(path: Path, split: str) -> list[Shard]:
    """The shards of a split in order. Raises PackedFolderError if there are none to be found."""
    if (path / ".nv-meta").is_dir():
        return _shards_of_folder(path, split)
    inside = path / METADATASET
    return _shards_of_metadataset(inside if inside.is_file() else path, split)


def read_index(shard: Shard) -> np.ndarray:
    """Offsets of a shard's packs and the end of the last, int64."""
    path = shard.path.with_name(f"{shard.path.name}.idx")
    try:
        offsets = np.fromfile(path, "<u8").astype(np.int64)
    except FileNotFoundError:
        raise PackedFolderError(f"{path} is missing; offline-packing retry writes it") from None
    own = offsets[shard.start : shard.end + 1]
    if len(own) != shard.end - shard.start + 1 or (np.diff(own) <= 0).any():
        raise PackedFolderError(
            f"{path} does not index the {shard.end} packs that the metadata count; "
            "offline-packing retry writes it"
        )
    return own


def _shards_of_folder(path: Path, split: str) -> list[Shard]:
    meta = path / ".nv-meta"
    try:
        splits = yaml.load((meta / "split.yaml").read_bytes(), _YAML_LOADER)  # safe loaders, both
        dataset = yaml.load((meta / "dataset.yaml").read_bytes(), _YAML_LOADER)
        counts = json.loads((meta / ".info.json").read_bytes())["shard_counts"]
        names, exclude = splits["split_parts"], splits.get("exclude")
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise PackedFolderError(f"{meta} cannot be read ({error})") from error
    if split not in names:
        raise PackedFolderError(f"{path} has no split {split!r}, only {', '.join(names)}")
    if exclude or not counts.keys() >= set(names[split]):  # a name with braces is several
        return _shards_of_metadataset(path, split)
    flavors = dataset.get("subflavors") or {}
    return [Shard(path / name, flavors, 0, counts[name]) for name in names[split]]


def _shards_of_metadataset(path: Path, split: str) -> list[Shard]:
    """The shards as Energon resolves them."""
    try:
        from megatron.energon import WorkerConfig
        from megatron.energon.metadataset import load_dataset
    except ImportError as error:
        raise PackedFolderError(f"{path} is no plain folder of packs: install Energon") from error

    if not path.exists():
        raise PackedFolderError(f"{path} is neither a packed folder nor a metadataset YAML")
    loaded = load_dataset(str(path)).get_datasets(
        training=split == "train",
        split_part=split,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        max_samples_per_sequence=None,
        decoder=None,
    )
    shards: list[Shard] = []
    weights = []
    for entry in loaded.datasets:
        own = _shards_of_dataset(entry)
        repetitions = 1 if entry.repetitions is None else entry.repetitions
        if repetitions != int(repetitions):
            raise PackedFolderError(
                f"{path} repeats {entry.dataset.path} {repetitions} times; only whole numbers of "
                "repetitions have a fixed number of packs"
            )
        shards += own * int(repetitions)
        if entry.weight is not None:
            weights.append(entry.weight / max(1, len(entry.dataset)))
    if weights and max(weights) > 1.01 * min(weights):
        logger.warning(
            "%s: weights are not the numbers of packs; here every pack comes once all the same; "
            "blend_epochized repeats datasets",
            path,
        )
    return shards


def _shards_of_dataset(entry: Any) -> list[Shard]:
    """The shards of one dataset, cut to its subset."""
    dataset = entry.dataset
    size = len(dataset)
    start, end = (0, size) if dataset.subset is None else dataset.subset.compute_subset(size)
    flavors = getattr(dataset, "subflavors", None) or {}
    if not hasattr(dataset, "shards"):  # a JSONL dataset
        path = Path(str(dataset.path))
        return [Shard(path, flavors, start, end, entry.aux or {})]
    if dataset.sample_excludes:
        raise PackedFolderError(
            f"{dataset.path}: split.yaml excludes single packs; a map-style dataset would read "
            "them: pack again without these samples"
        )
    shards, first = [], 0
    for shard in dataset.shards:
        own = max(0, start - first), min(shard.count, end - first)
        if own[0] < own[1]:
            shards.append(Shard(Path(str(shard.path)), flavors, *own))
        first += shard.count
    return shards
