"""Packs as lines of locators: texts are in the line, media stay where they are. Energon reads it
as a JSONL dataset with auxiliary ones.

train.jsonl, train.jsonl.idx    a pack per line (task_encoders.packs.references); Energon's offsets
metadataset.yaml                which folders the locators of each split mean
train-000000.jsonl              a shard, until all are written and joined
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
import yaml

from offline_packing.errors import DamagedError, StageError
from offline_packing.index.table import Index
from offline_packing.layouts.addresses import address_of, aux_datasets, check_address, locate
from offline_packing.layouts.base import JoinedLayout
from offline_packing.layouts.energon_metadata import subflavors_of
from offline_packing.layouts.shards import (
    PlannedSample,
    ShardFragment,
    ShardTask,
    estimate_pack_bytes,
)
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.sources import Source, SourceOptions
from offline_packing.storage.files import atomic_file, local_copy
from offline_packing.storage.tars import PackEntry
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack import MovedMediumError, Pack, StoredMedia, StoredMedium
from task_encoders.packs.pack_format import METADATASET, index_of_key, media_part_names
from task_encoders.storage.paths import REMEDY, read_indexed, read_range

if TYPE_CHECKING:
    from task_encoders.packs.references import Stores

#: Beside the splits' own lines, which are known by their offsets.
_OWN_FILE: Final = re.compile(r"[A-Za-z0-9_]+(-\d{6}\.jsonl|\.jsonl\.idx)")
_KEY: Final = re.compile(rb'\{"key":"([^"]+)"')
_MAX_KEY: Final = 1 << 12


class ReferencesLayout(JoinedLayout):
    """One line per pack; nothing is copied but text."""

    OWN_JSON = True
    PIECE = ".jsonl"
    COPIES_MEDIA = False
    MEDIA_ROOTS = METADATASET

    def pack_bytes(self, samples: Index, plan: PackPlan) -> npt.NDArray[np.int64]:
        return estimate_pack_bytes(samples, plan, with_media=False)

    def split_files(self, split: str) -> tuple[str, str]:
        return f"{split}.jsonl", f"{split}.jsonl.idx"

    def sizes(self, fragment: ShardFragment) -> npt.NDArray[np.int64]:
        return np.array([pack.size for pack in fragment.packs])

    def index(self, sizes: Sequence[npt.NDArray[np.int64]]) -> bytes:
        return np.cumsum(np.concatenate([[0], *sizes])).astype("<u8").tobytes()

    def check_sources(self, samples: Index, sources: Sequence[Source]) -> None:
        for table in samples.parts("source_id", "media"):
            media = table["media"].combine_chunks()
            owners = table["source_id"].combine_chunks().take(pc.list_parent_indices(media))
            found = pa.table([owners, media.flatten().field("kind")], ["source_id", "kind"])
            for row in found.group_by(found.column_names).aggregate([]).to_pylist():
                check_address(sources[row["source_id"]], row["kind"])

    def write(self, task: ShardTask) -> ShardFragment:
        entries: list[PackEntry] = []
        digest, size = xxhash.xxh3_128(), 0
        with atomic_file(task.folder / self.piece(task.shard.name)) as file:
            for key, samples in task.packs(with_media=False):
                line = _line(key, self.record(task, samples), task, samples)
                file.write(line)
                digest.update(line)
                entries.append(PackEntry(key, size, len(line), ()))
                size += len(line)
        return self.fragment(task, task.shard.name, size, digest.hexdigest(), entries)

    def media_roots(self, manifest: Manifest, sources: Sequence[SourceOptions]) -> bytes:
        aux = aux_datasets(sources)
        content = {
            "__module__": "megatron.energon",
            "__class__": "MetadatasetV2",
            "splits": {
                split: {
                    "path": f"{split}.jsonl",
                    "subflavors": subflavors_of(manifest.task, manifest.generation),
                    "aux": dict(aux),  # no anchors in the YAML
                }
                for split in dict.fromkeys(shard.split for shard in manifest.shards)
            },
        }
        return yaml.safe_dump(content, sort_keys=False).encode()

    def read_packs(self, task: ShardTask) -> Iterator[Pack]:
        split = _Split(task.folder, task.shard.split)
        path, begin = self.place(task)
        with _damage_named(path):
            is_own = path.name == self.piece(task.shard.name)
            lines = path.read_bytes() if is_own else read_range(path, begin, sum(task.span))
        for line in lines.splitlines():
            yield _pack(line, split)

    def read_pack(self, folder: Path, shard_file: str, key: str) -> Pack:
        split = shard_file.rpartition("-")[0]
        path = folder / f"{split}.jsonl"
        with _damage_named(path):
            found = _KEY.match(read_range(path, 0, _MAX_KEY))
            place = index_of_key(key) - index_of_key(found[1].decode() if found else "")
            line = _read_joined(path, place, 1)
        if not line.startswith(_begin_of_line(key)):
            raise DamagedError(f"{path} holds no pack {key!r}; {REMEDY}")
        return _pack(line, _Split(folder, split))

    def remove(self, folder: Path) -> None:
        joined = {path.stem for path in folder.glob("*.jsonl.idx")}
        for path in list(folder.iterdir()):
            is_own = path.name in joined or _OWN_FILE.fullmatch(path.name)
            if path.name == METADATASET or is_own:
                path.unlink()


def _pack(line: bytes, split: "_Split") -> Pack:
    """The pack of a line; a medium is read, as in training, when it is asked for. Raises StageError
    if that fails, or the line is damaged."""
    try:
        content = orjson.loads(line)
        key, record, places = (content[name] for name in ("key", "pack", "media"))
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise DamagedError(f"a line of packs is damaged: {error}; {REMEDY}") from error

    def read(place: Sequence[Any]) -> bytes:
        from task_encoders.packs.references import read_medium

        try:
            return read_medium(place, split.stores)
        except MovedMediumError as error:
            raise StageError(str(error)) from error

    def check(place: Sequence[Any]) -> None:
        root, container, size, mtime_ns, *member = place
        if root not in split.roots:
            raise StageError(
                f"{METADATASET} lacks {root}; run energon prepare in the source, then write again"
            )
        path = f"{split.roots[root]}/{container}"
        StoredMedium(path, 0 if member else None, size, mtime_ns).check()

    return Pack(key, record, StoredMedia(places, read, check))


def _begin_of_line(key: str) -> bytes:
    return orjson.dumps({"key": key})[:-1] + b","


def _line(key: str, record: bytes, task: ShardTask, samples: Sequence[PlannedSample]) -> bytes:
    """A pack's line. Raises StageError if a sample changed since it was measured."""
    names = media_part_names([name for sample in samples for name in sample.own_extensions])
    locators = [
        locate(sample.source_id, task.sources[sample.source_id], at)
        for sample in samples
        for at in sample.own_media
    ]
    for sample in samples:
        task.check_unchanged(sample)
    content = {"pack": orjson.Fragment(record), "media": dict(zip(names, locators, strict=True))}
    return _begin_of_line(key) + orjson.dumps(content)[1:] + b"\n"


def _read_joined(path: Path, first: int, count: int) -> bytes:
    return read_indexed(path, path.with_suffix(".jsonl.idx"), first, count)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} cannot be read: {error}; {REMEDY}") from error


class _Split:
    """Content of the metadataset for a split, read when it is first needed. Raises StageError if it
    cannot be used."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._name = folder / METADATASET, name

    @functools.cached_property
    def stores(self) -> "Stores":
        """Its auxiliary datasets, opened by Energon."""
        from megatron.energon.metadataset import load_dataset

        with self._translated():
            with local_copy(self._path) as path:
                if path != self._path:  # Energon wants the lines beside it, though it reads none
                    for split in yaml.safe_load(path.read_bytes())["splits"]:
                        (path.parent / f"{split}.jsonl").touch()
                loader: Any = load_dataset(path)
            aux = loader.splits[self._name].aux
            return {name: one.get_file_store() for name, one in aux.items()}

    @functools.cached_property
    def roots(self) -> Mapping[str, str]:
        """Their folders, or URLs."""
        with self._translated():
            aux = yaml.safe_load(self._path.read_bytes())["splits"][self._name]["aux"]
            return {name: address_of(one) for name, one in aux.items()}

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (AssertionError, KeyError, OSError, TypeError, ValueError, yaml.YAMLError) as error:
            raise StageError(f"{self._path} cannot be used: {error}") from error
