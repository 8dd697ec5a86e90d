"""A packed folder as a map-style dataset: any pack by its number, for trainers that want `len` and
`[i]` instead of a loader.

    folder = PackedFolder("out/packed", task_encoder)
    folder[7]               a pack's bytes, as written
    folder.row(7)           encoded, as Energon's loader encodes it
    folder.batch([7, 9])    both in one row

    DataLoader(folder, batch_sampler=…, collate_fn=folder.collate)      encodes in its workers

Opening reads only the `.tar.idx` beside each shard: the offset of each pack's first header, and the
end. No file stays open, so that a folder can be pickled and forked.
"""

import io
import json
import logging
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import yaml

if TYPE_CHECKING:
    from task_encoders.energon_samples import PackedBatch, PackedRowSample
    from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder

logger = logging.getLogger(__name__)

#: Key and part of a member, as Energon parts them; and members that Energon takes for notes.
_MEMBER: Final = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_NOTE: Final = re.compile(r"__[^/]*__($|/)")
#: Twenty times as fast, where PyYAML was built with it.
_YAML_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class PackedFolderError(ValueError):
    """A folder whose packs cannot be found, or read."""


class RawPack(NamedTuple):
    """One pack as it is stored."""

    key: str
    #: content by name: 'img000.jpg', 'json'
    members: dict[str, bytes]
    #: its number in the folder
    number: int
    #: those of its dataset
    subflavors: Mapping[str, Any]


class Shard(NamedTuple):
    """The packs [start, end) of one shard."""

    path: Path
    subflavors: Mapping[str, Any]
    start: int
    end: int


class PackedFolder:
    """The packs of one split, in written order. Implements torch's protocol of map-style datasets.

    The datasets of a blend follow each other, and each pack comes once, or as often as a
    `blend_epochized` repeats its dataset. Energon draws by weight instead; weights other than the
    numbers of packs are warned of.

    Args:
        path: a local folder, or a metadataset YAML (which needs Energon, a folder does not).
        task_encoder: for rows and batches; its settings are compared with the folder's.
        split: train, val or test.

    Raises:
        PackedFolderError: there is no such split, or an index is missing or damaged.
        PackingSettingsError: the environment or the task encoder contradicts the data.
    """

    def __init__(
        self,
        path: str | Path,
        task_encoder: "Qwen2VLTaskEncoder | None" = None,
        *,
        split: str = "train",
    ) -> None:
        self.path = Path(path)
        self.task_encoder = task_encoder
        if (self.path / ".nv-meta").is_dir():
            self.shards = _shards_of_folder(self.path, split)
        else:
            self.shards = _shards_of_metadataset(self.path, split)
        indices = [_read_index(shard) for shard in self.shards]
        #: number of the first pack of each shard, and of all packs
        self._firsts = np.cumsum([0, *(len(index) - 1 for index in indices)])
        #: one more per shard than it has packs
        self._offsets = np.concatenate([np.empty(0, np.int64), *indices])
        if task_encoder is not None:
            _check(self.shards, task_encoder)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, number: int) -> RawPack:
        """Raises IndexError, and PackedFolderError where a shard is cut or damaged."""
        wanted = number + len(self) if number < 0 else number
        if not 0 <= wanted < len(self):
            raise IndexError(f"{self.path} has {len(self)} packs, no number {number}")
        place = int(np.searchsorted(self._firsts, wanted, "right")) - 1
        start, end = self._offsets[wanted + place : wanted + place + 2].tolist()
        shard = self.shards[place]
        with open(shard.path, "rb") as file:
            file.seek(start)
            data = file.read(end - start)
        key, members = _members_of(data, f"{shard.path}, bytes {start} to {end}", end - start)
        return RawPack(key, members, wanted, shard.subflavors)

    def __iter__(self) -> Iterator[RawPack]:
        return map(self.__getitem__, range(len(self)))

    def row(self, number: int) -> "PackedRowSample":
        """A pack encoded; `split_row(row.row)` gives back its sub-samples, whose keys are
        `row.sub_sample_keys`. Raises SampleError if nothing of it can be used."""
        return self._encode(self[number])

    def batch(self, numbers: Sequence[int]) -> "PackedBatch":
        """Packs in one row with merged cu_lengths, as a micro batch of the Energon loader."""
        return self.collate([self[number] for number in numbers])

    def collate(self, packs: Sequence[RawPack]) -> "PackedBatch":
        """The same for packs that are read: a DataLoader's `collate_fn`."""
        return self._task_encoder.batch([self._encode(pack) for pack in packs])

    @property
    def _task_encoder(self) -> "Qwen2VLTaskEncoder":
        if self.task_encoder is None:
            raise PackedFolderError(f"{self.path}: rows need a task_encoder; give one")
        return self.task_encoder

    def _encode(self, pack: RawPack) -> "PackedRowSample":
        from task_encoders.energon_samples import PackedSample, part_filter, sample_loader

        parts = {name: data for name, data in pack.members.items() if part_filter(name)}
        sample = PackedSample(
            __key__=pack.key,
            __restore_key__=("PackedFolder", pack.number),
            __subflavors__=dict(pack.subflavors),
            **sample_loader({"__key__": pack.key, **parts}),
        )
        return self._task_encoder.encode_sample(sample)


def _check(shards: Sequence[Shard], task_encoder: "Qwen2VLTaskEncoder") -> None:
    """As the task encoder checks the datasets that Energon gives it."""
    flavors_of = {shard.path.parent: shard.subflavors for shard in shards}
    task_encoder.is_blend = task_encoder.is_blend or len(flavors_of) > 1
    for folder, flavors in flavors_of.items():
        task = flavors.get("offline_packing")
        task_encoder.settings.resolve_task(None, task, blend=task_encoder.is_blend)
        task_encoder.check_manifest(folder)


def _read_index(shard: Shard) -> np.ndarray:
    """Offsets of a shard's packs and the end of the last, int64."""
    path = shard.path.with_name(f"{shard.path.name}.idx")
    try:
        offsets = np.fromfile(path, "<u8").astype(np.int64)
    except FileNotFoundError:
        raise PackedFolderError(f"{path} is missing; offline-packing retry writes it") from None
    own = offsets[shard.start : shard.end + 1]
    if len(own) != shard.end - shard.start + 1 or (np.diff(own) <= 0).any():
        raise PackedFolderError(
            f"{path} does not index the {shard.end} packs that .nv-meta/.info.json counts; "
            "offline-packing retry writes it"
        )
    return own


def _members_of(data: bytes, where: str, size: int) -> tuple[str, dict[str, bytes]]:
    """The key and the members of one pack, from its part of a tar."""
    if len(data) < size:
        raise PackedFolderError(
            f"{where}: the shard ends {size - len(data)} bytes early; offline-packing verify names "
            "the remedy"
        )
    found: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                match = _MEMBER.fullmatch(member.name)
                content = tar.extractfile(member)
                if match is not None and content is not None and not _NOTE.match(member.name):
                    found.setdefault(match[1], {})[match[2]] = content.read()
    except tarfile.TarError as error:
        raise PackedFolderError(f"{where}: damaged ({error}); verify names the remedy") from error
    if len(found) != 1:
        raise PackedFolderError(f"{where}: {len(found)} packs instead of one; verify the folder")
    return next(iter(found.items()))


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
        own = _shards_of_dataset(entry.dataset)
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


def _shards_of_dataset(dataset: Any) -> list[Shard]:
    """The shards of one dataset, cut to its subset."""
    if dataset.sample_excludes:
        raise PackedFolderError(
            f"{dataset.path}: split.yaml excludes single packs; a map-style dataset would read "
            "them: pack again without these samples"
        )
    size = len(dataset)
    start, end = (0, size) if dataset.subset is None else dataset.subset.compute_subset(size)
    shards, first = [], 0
    for shard in dataset.shards:
        own = max(0, start - first), min(shard.count, end - first)
        if own[0] < own[1]:
            shards.append(Shard(Path(str(shard.path)), dataset.subflavors or {}, *own))
        first += shard.count
    return shards
