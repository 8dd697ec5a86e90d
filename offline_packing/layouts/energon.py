"""WebDataset shards with Energon's metadata: the layout that the task encoder here reads.

train-000000.tar, train-000000.tar.idx    see tars.py; perhaps in a folder train-0000
.nv-meta/                                 see energon_metadata.py
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

from offline_packing.layouts.base import Layout
from offline_packing.layouts.energon_metadata import (
    METADATA_FILES,
    write_energon_metadata,
    yaml_bytes,
)
from offline_packing.layouts.shards import ShardFragment, ShardTask
from offline_packing.storage.files import (
    atomic_file,
    hash_file,
    read_each,
    remove_folder,
    write_atomically,
)
from offline_packing.storage.tars import PackEntry, TarShardWriter, index_bytes, read_pack, scan_tar
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack import Pack

_SHARD: Final = re.compile(r"[A-Za-z0-9_]+-\d{6}\.tar(\.idx)?")
_FOLDER: Final = re.compile(r"[A-Za-z0-9_]+-\d{4,}")


class EnergonLayout(Layout):
    """Tar shards."""

    OWN_JSON = True
    METADATA: ClassVar[Sequence[str]] = tuple(f".nv-meta/{name}" for name in METADATA_FILES)

    def shard_file(self, shard_name: str) -> str:
        return f"{shard_name}.tar"

    def write(self, task: ShardTask) -> ShardFragment:
        name = self.shard_file(task.shard.name)
        path = task.folder / name
        if path.parent != task.folder:
            path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as file:
            writer = TarShardWriter(file)
            for key, samples in task.packs():
                writer.add(key, self.checked_members(task, samples))
            digest = writer.finish()
        write_atomically(path.with_suffix(".tar.idx"), index_bytes(writer.entries))
        return self.fragment(task, name, writer.size, digest, writer.entries)

    def finish(self, folder: Path, manifest: Manifest, fragments: Sequence[Path]) -> None:
        splits: dict[str, list[str]] = {split: [] for split in manifest.counts.packs}
        for shard in manifest.shards:
            splits[shard.split].append(shard.name)
        shards = read_each(folder, ShardFragment.load, fragments)
        packs = ((shard.name, shard.packs) for shard in shards)
        identity = {"content_hash": manifest.content_hash, "generation": manifest.generation}
        write_energon_metadata(folder, manifest.task, splits, packs, **identity)

    def describe_anew(self, folder: Path, dataset: Mapping[str, Any], manifest: Manifest) -> None:
        """Replace dataset.yaml, and write what Energon 5.0 reads instead of .info.json."""
        counts = {shard.name: shard.packs for shard in manifest.shards}
        contents = {"dataset.yaml": dataset, ".info.yaml": {"shard_counts": counts}}
        for name, content in contents.items():
            write_atomically(folder / ".nv-meta" / name, yaml_bytes(content))

    def is_there(self, shard_name: str, split: str, files: Collection[str]) -> bool:
        name = self.shard_file(shard_name)
        return name in files and f"{name}.idx" in files

    def find_damage(self, task: ShardTask, expected_hash: str) -> list[tuple[str, str]]:
        name = self.shard_file(task.shard.name)
        path = task.folder / name
        if not path.is_file():
            return [(name, "is missing")]
        if hash_file(path) != expected_hash:
            return [(name, "is not what was written: its hash differs")]
        try:
            if path.with_suffix(".tar.idx").read_bytes() == index_bytes(list(scan_tar(path))):
                return []
        except (FileNotFoundError, IsADirectoryError):
            return [(f"{name}.idx", "is missing")]
        return [(f"{name}.idx", "does not match the tar")]

    def read_packs(self, task: ShardTask) -> Iterator[Pack]:
        path = task.folder / self.shard_file(task.shard.name)
        entries = list(scan_tar(path))
        with path.open("rb") as file:
            for entry in entries:
                file.seek(entry.offset)
                yield _pack(entry, file.read(entry.size))

    def read_pack(self, folder: Path, shard_file: str, key: str) -> Pack:
        return _pack(*read_pack(folder / shard_file, key))

    def remove(self, folder: Path) -> None:
        _remove_shards(folder)
        for path in list(folder.iterdir()):
            if _FOLDER.fullmatch(path.name) and path.is_dir():
                _remove_shards(path)
                with suppress(OSError):  # it holds files of others
                    path.rmdir()
        remove_folder(folder / ".nv-meta")


def _remove_shards(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if _SHARD.fullmatch(path.name):
            path.unlink()


def _pack(entry: PackEntry, data: bytes) -> Pack:
    starts = [(part, part.offset - entry.offset) for part in entry.parts]
    members = {part.name: data[start : start + part.size] for part, start in starts}
    return Pack.of(entry.key, members)
