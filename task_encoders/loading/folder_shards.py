"""Shards in a split of a packed folder or a metadataset, the offsets of their packs, and their
order.

A folder's own metadata are read here; whatever refers to other datasets is Energon's to resolve.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from task_encoders.packs.manifest import read_manifest
from task_encoders.storage.energon_paths import energon_url, explain
from task_encoders.storage.paths import REMEDY, check_exists, path_of, plain_name
from task_encoders.storage.remote_requests import in_a_line
from task_encoders.versions import require_supported

logger = logging.getLogger(__name__)

#: Twenty times as fast, where PyYAML was built with it.
_YAML_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MOST_NESTED: Final = 100
#: Errors of reading damaged metadata.
_DAMAGED: Final = (AttributeError, OSError, ValueError, LookupError, TypeError, RecursionError)

_REMEDY: Final = f"{REMEDY}; or index, if others wrote the packs"

#: Packs of an epoch, over the packs that there are: weights that ask for more are a mistake.
MOST_PASSES: Final = 100

Numbers = npt.NDArray[np.int64]


class PackedFolderError(ValueError):
    """A folder whose packs cannot be found, or read."""


class ShardRange(NamedTuple):
    """The packs [start, end) of one tar."""

    path: Path
    #: the folder with the manifest
    root: Path
    subflavors: Mapping[str, Any]
    start: int
    end: int

    @property
    def num_packs(self) -> int:
        return self.end - self.start


def find_shards(path: str | Path, split: str) -> tuple[list[ShardRange], Numbers]:
    """Find the shards of a split, and the packs of an epoch by their places in them, (num_packs,).

    Raises PackedFolderError if there are none to be found, StorageError if a URL leads nowhere.
    """
    root = path_of(path)
    if (root / ".nv-meta").is_dir():
        shards, order = _shards_of_folder(root, split)
    else:
        check_exists(root)
        shards, order = _shards_of_metadataset(root, split)
    if not len(order):
        raise no_packs(path, split)
    return shards, order


def no_packs(path: str | Path, split: str) -> PackedFolderError:
    """Return the error of a split that is missing or empty."""
    return PackedFolderError(
        f"{path} has no packs in its {split} split; pack with a share of {split} in output.split, "
        f"or a larger one, and name {split} in the splits of a metadataset"
    )


def read_index(shard: ShardRange) -> Numbers:
    """Return the offsets of a shard's packs and the end of the last pack."""
    path = shard.path.parent / f"{shard.path.name}.idx"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise PackedFolderError(f"{path} is missing; {_REMEDY}") from None
    offsets = np.frombuffer(data, "<u8", len(data) // 8).astype(np.int64)
    own = offsets[shard.start : shard.end + 1]
    if len(own) != shard.num_packs + 1 or (np.diff(own) <= 0).any():
        raise PackedFolderError(
            f"{path} does not index the {shard.end} packs that the metadata count; {_REMEDY}"
        )
    return own


def spread(sizes: Sequence[int], draws: Sequence[int]) -> Numbers:
    """Return the places of an epoch's packs, where `draws[i]` come from dataset i of `sizes[i]`
    packs.

    Each dataset's packs come in their order, again from the first after the last, and evenly over
    the epoch: sizes [2, 4], draws [4, 4] -> 0 2 1 3 0 4 1 5.
    """
    firsts = np.cumsum([0, *sizes])[:-1]
    rounds = zip(firsts, sizes, draws, strict=True)
    places = [first + np.arange(n) % max(1, size) for first, size, n in rounds]
    times = [(np.arange(n) + 0.5) / max(1, n) for n in draws]
    return np.concatenate(places)[np.argsort(np.concatenate(times), kind="stable")]


def _read_yaml(path: Path) -> Any:
    """Parse a file of metadata. Raises ValueError for nesting that would overflow the C stack."""
    data, depth = path.read_bytes(), 0
    for event in yaml.parse(data, _YAML_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_NESTED:
            raise ValueError(f"{path.name} is nested more than {_MOST_NESTED} levels deep")
    return yaml.load(data, _YAML_LOADER)  # safe loaders, both


def _shards_of_folder(path: Path, split: str) -> tuple[list[ShardRange], Numbers]:
    meta = path / ".nv-meta"
    try:
        splits, dataset = _read_yaml(meta / "split.yaml"), _read_yaml(meta / "dataset.yaml")
        info = json.loads((meta / ".info.json").read_bytes())
        counts = {plain_name(name): int(count) for name, count in info["shard_counts"].items()}
        parts, exclude = dict(splits["split_parts"]), splits.get("exclude")
        names = [plain_name(name) for name in parts.get(split, ())]
        flavors = dict(dataset.get("subflavors") or {})
    except (*_DAMAGED, yaml.YAMLError) as error:
        raise PackedFolderError(f"{meta} cannot be read ({in_a_line(error)}); {_REMEDY}") from error
    if split not in parts:
        raise PackedFolderError(f"{path} has no split {split!r}, only {', '.join(map(str, parts))}")
    if exclude or not counts.keys() >= set(names):  # a name with braces is several
        return _shards_of_metadataset(path, split)
    shards = [ShardRange(path / name, path, flavors, 0, counts[name]) for name in names]
    return shards, np.arange(sum(shard.num_packs for shard in shards))


def _shards_of_metadataset(path: Path, split: str) -> tuple[list[ShardRange], Numbers]:
    """Find shards as Energon resolves them. In training, datasets are spread over an epoch by their
    weights or repetitions; otherwise they follow each other, each pack once."""
    entries = load_datasets(path, split)
    parts = [_shards_of_dataset(entry) for entry in entries]
    sizes = [sum(shard.num_packs for shard in part) for part in parts]
    shards = [shard for part in parts for shard in part]
    if split != "train":
        return shards, np.arange(sum(sizes))
    draws = _draws(entries, sizes)
    if draws != sizes:
        folders = (str(entry.dataset.path) for entry in entries)
        each = zip(draws, sizes, folders, strict=True)
        said = ", ".join(f"{n} of the {size} of {folder}" for n, size, folder in each)
        if sum(draws) > MOST_PASSES * sum(sizes):
            raise PackedFolderError(
                f"{path}: by weight, an epoch would have {sum(draws)} packs ({said}); write a "
                "blend_epochized with repetitions"
            )
        logger.warning("%s: an epoch has %d packs: %s", path, sum(draws), said)
    return shards, spread(sizes, draws)


def load_datasets(path: Path, split: str) -> list[Any]:
    """Load the datasets of a split, as Energon resolves them. Raises PackedFolderError."""
    if not path.is_file() and not (path / ".nv-meta").is_dir():
        raise PackedFolderError(
            f"{path} is neither a packed folder nor a metadataset YAML; offline-packing run "
            "completes one, and index describes packs of others"
        )
    require_supported("megatron-energon")
    try:
        from megatron.energon import WorkerConfig
        from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
        from megatron.energon.metadataset import load_dataset
    except ImportError as error:
        raise PackedFolderError(
            f"{path} is read by Energon, which is not installed; pip install megatron-energon"
        ) from error

    try:
        loaded = load_dataset(energon_url(path)).get_datasets(
            training=split == "train",
            split_part=split,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            max_samples_per_sequence=None,
            decoder=None,
        )
    except EmptyDatasetError as error:
        raise no_packs(path, split) from error
    except Exception as error:  # Energon's parsers have many
        if isinstance(error, KeyError | AssertionError) and repr(split) in str(error):
            raise no_packs(path, split) from error
        raise PackedFolderError(
            f"{path}, split {split!r}: Energon cannot read it ({explain(error)})"
        ) from error
    return list(loaded.datasets)


def _draws(entries: Sequence[Any], sizes: Sequence[int]) -> list[int]:
    """Count the packs of an epoch from each dataset of a blend. By weight, an epoch is as long as
    it takes for each pack to come once: sizes [100, 100], weights [2, 1] -> [200, 100]."""
    if any(entry.weight is None for entry in entries):
        repetitions = [1 if entry.repetitions is None else entry.repetitions for entry in entries]
        return [round(size * times) for size, times in zip(sizes, repetitions, strict=True)]
    weights = [entry.weight for entry in entries]
    pairs = list(zip(sizes, weights, strict=True))
    epoch = max((size / weight for size, weight in pairs if weight), default=0)
    return [round(epoch * weight) if size else 0 for size, weight in pairs]


def _shards_of_dataset(entry: Any) -> list[ShardRange]:
    """Return the shards of one dataset, cut to its subset."""
    dataset = entry.dataset
    if not hasattr(dataset, "shards"):  # a JSONL dataset
        raise PackedFolderError(f"{dataset.path} is no folder of shards; name a packed folder")
    size = len(dataset)
    start, end = (0, size) if dataset.subset is None else dataset.subset.compute_subset(size)
    flavors = getattr(dataset, "subflavors", None) or {}
    if dataset.sample_excludes:
        raise PackedFolderError(
            f"{dataset.path}: split.yaml excludes single packs; a map-style dataset would read "
            "them: pack again without these samples"
        )
    shards, root, first = [], path_of(dataset.path), 0
    for shard in dataset.shards:
        own = max(0, start - first), min(shard.count, end - first)
        if own[0] < own[1]:
            shards.append(ShardRange(path_of(shard.path), root, flavors, *own))
        first += shard.count
    return shards


def order_of_steps(
    shards: Sequence[ShardRange], order: Numbers, split: str
) -> tuple[Numbers, int, bool]:
    """Return the packs of an epoch, step by step; the number of ranks of `pack.order`; and whether
    each step's packs are of one kind (`pack.order.uniform`). If not all datasets were packed with
    `pack.order` for the same ranks, return the given order, 0 and False.

    Any divisor of these ranks that takes the packs in turn has packs of similar cost, or of one
    kind, at each step.
    """
    roots = list(dict.fromkeys(shard.root for shard in shards))
    manifests = [read_manifest(root) for root in roots]
    layouts = [one.order if one else {} for one in manifests]
    ranks = {layout.get("num_ranks", 0) for layout in layouts}
    if len(ranks) != 1 or not (num_ranks := int(ranks.pop())):
        return order, 0, False
    sizes = [sum(shard.num_packs for shard in shards if shard.root == root) for root in roots]
    if [one.counts.packs.get(split) for one in manifests if one] != sizes:  # a part of an output
        return order, 0, False
    firsts = np.cumsum([0, *sizes])
    workers = [max(1, int(layout["num_workers"])) for layout in layouts]
    tables = [order_of_reading(n, num_ranks, own) for n, own in zip(sizes, workers, strict=True)]
    places = np.concatenate([first + table for first, table in zip(firsts, tables, strict=False)])
    if any(n % (num_ranks * own) for n, own in zip(sizes, workers, strict=True)):
        # steps of several datasets cannot follow each other
        if len(order) == len(places) and len(roots) == 1:
            return places, num_ranks, False
        return order, 0, False
    steps = places.reshape(-1, num_ranks)
    if split == "train":
        counts = np.histogram(order, firsts)[0] // num_ranks
        steps = steps[spread([size // num_ranks for size in sizes], counts.tolist())]
    return steps.ravel(), num_ranks, all(layout.get("uniform") for layout in layouts)


def order_of_reading(num_packs: int, num_ranks: int, num_workers: int) -> Numbers:
    """Return packs in the order in which Energon's workers read them, step by step. Steps at which
    not every rank has a pack come last: 2 ranks of 2 workers, 8 packs: 0 4 | 2 6 | 1 5 | 3 7.

    Energon cuts the packs into num_ranks · num_workers blocks, rank after rank and worker after
    worker; a rank takes one pack from each of its workers in turn. What does not divide evenly
    makes some blocks one pack longer, in the order of a generalised bit reversal
    (`Sharder.split_samples_to_workers`).
    """
    step = steps_of_reading(num_packs, num_ranks, num_workers)
    is_full = np.bincount(step, minlength=1) == num_ranks
    return np.lexsort((np.arange(num_packs), step, ~is_full[step]))


def steps_of_reading(num_packs: int, num_ranks: int, num_workers: int) -> Numbers:
    """Return the step at which each pack is read, (num_packs,); see `order_of_reading`."""
    workers = max(1, num_workers)
    blocks = num_ranks * workers
    size, longer = divmod(num_packs, blocks)
    sizes = np.full(blocks, size)
    sizes[_bit_reversal(np.arange(blocks))[:longer]] += 1
    worker = np.repeat(np.arange(blocks) % workers, sizes)
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return (np.arange(num_packs) - starts) * workers + worker


def _bit_reversal(indices: Numbers) -> Numbers:
    """Reverse bits, [0 1 2 3 4 5 6 7] -> [0 4 2 6 1 5 3 7]: both halves so, alternately."""
    if len(indices) <= 2:
        return indices
    middle = len(indices) // 2
    left, right = _bit_reversal(indices[:middle]), _bit_reversal(indices[middle:])
    alternating = np.stack([left, right[:middle]], axis=1).ravel()
    return np.append(alternating, right[middle:])  # an odd number leaves one
