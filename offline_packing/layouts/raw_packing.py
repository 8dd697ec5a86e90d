"""Packs as single files in one folder, for people to look at and for tools that read files.

    raw_packing_data/ps_00000000.img000.jpg
    raw_packing_data/ps_00000000.img001.jpg
    raw_packing_data/ps_00000000.json

A shard is then only the task that writes its packs; the manifest records the split of each.
"""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import xxhash

from offline_packing.errors import StageError
from offline_packing.layouts.base import Layout
from offline_packing.layouts.shard_tasks import ShardTask
from offline_packing.layouts.shards import ShardFragment
from offline_packing.storage.files import (
    hash_bytes,
    sync_folder,
    translate_disk_full,
    write_atomically,
)
from offline_packing.storage.paths import is_remote, remove_folder
from offline_packing.storage.tars import FilePart, PackEntry
from task_encoders.packs.pack import Pack
from task_encoders.packs.pack_format import JSON_PART

FOLDER: Final = "raw_packing_data"


class RawPackingLayout(Layout):
    """One file per image and per pack's JSON."""

    def shard_file(self, shard_name: str) -> str:
        return shard_name

    def write(self, task: ShardTask) -> ShardFragment:
        entries: list[PackEntry] = []
        digest = xxhash.xxh3_128()
        offset = 0
        with _files_of_shard(task) as store:
            for key, samples in task.packs():
                parts = []
                for name, data in self.checked_members(task, samples):
                    store(f"{key}.{name}", data)
                    digest.update(data)
                    parts.append(FilePart(name, offset, len(data), hash_bytes(data)))
                    offset += len(data)
                start = parts[0].offset
                entries.append(PackEntry(key, start, offset - start, tuple(parts)))
        name = self.shard_file(task.shard.name)
        return self.fragment(task, name, offset, digest.hexdigest(), entries)

    def is_there(self, shard_name: str, split: str, files: Collection[str]) -> bool:
        return True  # find_damage names the fragment as well

    def find_damage(self, task: ShardTask, expected_hash: str) -> list[tuple[str, str]]:
        fragment = ShardFragment.load(task.fragment_path)
        found: list[tuple[str, str]] = []
        for key, part in ((entry.key, part) for entry in fragment.packs for part in entry.parts):
            assert isinstance(part, FilePart)
            path = task.folder / FOLDER / f"{key}.{part.name}"
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                found.append((f"{FOLDER}/{path.name}", "is missing"))
                continue
            if hash_bytes(data) != part.xxh3_128:
                found.append((f"{FOLDER}/{path.name}", "is not what was written: its hash differs"))
        if found:
            name = str(task.fragment_path.relative_to(task.folder))
            found.append((name, "describes packs that are damaged"))
        return found

    def read_packs(self, task: ShardTask) -> Iterator[Pack]:
        for entry in ShardFragment.load(task.fragment_path).packs:
            paths = {p.name: task.folder / FOLDER / f"{entry.key}.{p.name}" for p in entry.parts}
            try:
                members = {name: path.read_bytes() for name, path in paths.items()}
            except OSError as error:
                raise StageError(f"{error.filename} cannot be read: {error.strerror}") from error
            yield Pack.of(entry.key, members)

    def read_pack(self, folder: Path, shard_file: str, key: str) -> Pack:
        paths = sorted((folder / FOLDER).glob(f"{key}.*"))
        members = {path.name.partition(".")[2]: path.read_bytes() for path in paths}
        if JSON_PART not in members:
            raise StageError(f"{folder / FOLDER} holds no pack {key!r}")
        return Pack.of(key, members)

    def remove(self, folder: Path) -> None:
        remove_folder(folder / FOLDER)


@contextmanager
def _files_of_shard(task: ShardTask) -> Iterator[Callable[[str, bytes], object]]:
    """A function that stores a file of a shard. They get their names when the block succeeds; as
    objects, which are whole, at once."""
    folder = task.folder / FOLDER
    if is_remote(folder):
        yield lambda name, data: write_atomically(folder / name, data)
        return
    partial = task.fragment_path.with_suffix(".partial")
    remove_folder(partial)  # left by a killed run
    partial.mkdir()
    folder.mkdir(exist_ok=True)
    with translate_disk_full(partial):
        yield lambda name, data: (partial / name).write_bytes(data)
        os.sync()  # once: a sync per small file would take most of the time
        for path in partial.iterdir():
            path.rename(folder / path.name)
    sync_folder(folder)
    partial.rmdir()
