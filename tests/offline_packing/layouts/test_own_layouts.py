"""A layout of one's own is one class, and its name in LAYOUTS."""

import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from offline_packing.errors import StageError
from offline_packing.layouts import LAYOUTS, Layout
from offline_packing.layouts.shards import ShardFragment, ShardTask
from offline_packing.report.preview import preview
from offline_packing.storage.files import hash_bytes
from offline_packing.storage.tars import PackEntry, Part
from offline_packing.verify.verify import verify
from task_encoders.packs.pack import Pack
from tests.helpers.datasets import captioning_pairs, make_run, pack_all
from tests.helpers.repairs import repair


class ZipLayout(Layout):
    """One zip a shard, its members as in a tar."""

    def shard_file(self, shard_name: str) -> str:
        return f"{shard_name}.zip"

    def write(self, task: ShardTask) -> ShardFragment:
        name = self.shard_file(task.shard.name)
        partial = task.folder / f"{name}.tmp"
        packs = []
        with zipfile.ZipFile(partial, "w") as file:
            for key, rows in task.packs():
                members = self.checked_members(task, rows)
                for part, data in members:
                    file.writestr(zipfile.ZipInfo(f"{key}.{part}"), data)
                parts = tuple(Part(part, 0, len(data)) for part, data in members)
                packs.append(PackEntry(key, 0, sum(part.size for part in parts), parts))
        partial.rename(task.folder / name)
        content = (task.folder / name).read_bytes()
        return self.fragment(task, name, len(content), hash_bytes(content), packs)

    def is_there(self, shard_name: str, split: str, files: Collection[str]) -> bool:
        return self.shard_file(shard_name) in files

    def find_damage(self, task: ShardTask, expected_hash: str) -> list[tuple[str, str]]:
        path = task.folder / self.shard_file(task.shard.name)
        if not path.exists():
            return [(path.name, "is missing")]
        same = hash_bytes(path.read_bytes()) == expected_hash
        return [] if same else [(path.name, "is not what was written")]

    def read_packs(self, task: ShardTask) -> Iterator[Pack]:
        name, keys = self.shard_file(task.shard.name), task.keys()
        for key in keys:
            yield self.read_pack(task.folder, name, key)

    def read_pack(self, folder: Path, shard_file: str, key: str) -> Pack:
        try:
            with zipfile.ZipFile(folder / shard_file) as file:
                names = [name for name in file.namelist() if name.startswith(f"{key}.")]
                return Pack.of(key, {name.partition(".")[2]: file.read(name) for name in names})
        except (OSError, zipfile.BadZipFile) as error:
            raise StageError(f"{shard_file} cannot be read: {error}") from error

    def remove(self, folder: Path) -> None:
        for path in folder.glob("*.zip"):
            path.unlink()


def test_a_layout_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "zip", ZipLayout())
    run = make_run(captioning_pairs(tmp_path / "data"), tmp_path / "out", output={"layout": "zip"})
    manifest = pack_all(run)
    shards = sorted((tmp_path / "out").glob("*.zip"))
    assert [path.name for path in shards] == [shard.name for shard in manifest.shards]
    assert len(shards) > 1
    assert verify(run, deep=True).num_samples == manifest.counts.packed == 40
    assert len(list(preview(run, num_packs=2))) == 2
    before = shards[0].read_bytes()
    shards[0].write_bytes(before[:-1])
    shards[1].unlink()
    assert not verify(run).ok
    repair(run)
    assert shards[0].read_bytes() == before
    assert verify(run, deep=True).ok
