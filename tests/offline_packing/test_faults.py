"""Faults of the machine and its users: full disks, failing reads, edits, second launches."""

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offline_packing.cli.commands import cli
from offline_packing.errors import DiskFullError, StageError
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.shards import ShardTask
from offline_packing.measure.measure import measure
from offline_packing.runs.run import Run
from offline_packing.storage import files
from offline_packing.storage.files import remove_temporaries, write_atomically
from offline_packing.verify.verify import verify
from tests.helpers.command import Command, invoke
from tests.helpers.datasets import (
    captioning_pairs,
    config_file,
    make_config,
    make_run,
    pack_all,
    packed_run,
    plan_index,
    write_planned,
)
from tests.helpers.outputs import repair, shard_files
from tools import kill_test


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return captioning_pairs(tmp_path / "data")


@pytest.fixture
def planned(data: Path, tmp_path: Path) -> Run:
    """A run that is ready to write."""
    run = make_run(data, tmp_path / "out")
    measure(run)
    plan_index(run)
    return run


def leftovers(run: Run) -> list[str]:
    return [path.name for path in run.workspace.root.rglob("*.tmp")]


def test_write_that_the_system_refuses(data: Path, tmp_path: Path, command: Command) -> None:
    """A real failure of the system call, as a disk that is full gives it."""
    output = {"packs_per_shard": 1000}
    config = config_file(tmp_path / "a.yaml", make_config(data, tmp_path / "out", output=output))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        code, _, error = command("run", config, "--quiet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert error.startswith(f"error: {tmp_path}/out/train-000000.tar cannot be written: ")
    assert error.endswith("; free some space and run again\n")
    assert error.count("\n") == 1
    assert not list((tmp_path / "out").glob("*.tar*"))
    assert "problems        0" in invoke("run", config).output
    assert not list((tmp_path / "out").rglob("*.tmp"))


@pytest.mark.parametrize("is_moved", [True, False])
def test_output_moved_or_removed_while_it_is_written(
    planned: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_moved: bool
) -> None:
    """It vanishes in the middle of a shard: both remedies work, and nothing takes its place."""
    root, true_write = planned.workspace.root, LAYOUTS["energon"].write

    def write(task: ShardTask) -> Any:
        fragment = true_write(task)
        if task.shard.name.startswith("train-000001"):
            root.rename(tmp_path / "elsewhere") if is_moved else shutil.rmtree(root)
        return fragment

    with monkeypatch.context() as patch:
        patch.setattr(LAYOUTS["energon"], "write", write)
        with pytest.raises(StageError, match="was moved or removed while it was written; move it"):
            write_planned(planned)
    assert not root.exists()
    if is_moved:
        (tmp_path / "elsewhere").rename(root)
        write_planned(planned)
    else:
        pack_all(planned)
    assert verify(planned).ok


@pytest.mark.parametrize(
    ("number", "after"), [(errno.ENOSPC, 0), (errno.EDQUOT, 1), (errno.ENOSPC, 6)]
)
def test_disk_full_at_any_file(
    planned: Run, monkeypatch: pytest.MonkeyPatch, number: int, after: int
) -> None:
    true_sync = os.fsync
    calls: list[int] = []

    def sync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        true_sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", sync)
        with pytest.raises(DiskFullError, match=r"cannot be written: .*; free some space"):
            write_planned(planned)
    assert not planned.workspace.manifest.exists()
    assert leftovers(planned) == []
    write_planned(planned)
    assert verify(planned).ok


def test_failing_disk_of_the_source(planned: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    true_read = os.pread
    calls: list[int] = []

    def read(descriptor: int, size: int, offset: int) -> bytes:
        calls.append(descriptor)
        if len(calls) == 21:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return true_read(descriptor, size, offset)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pread", read)
        message = r"1 of 3 shards could not be written; .*cannot be read: Input/output error"
        with pytest.raises(StageError, match=message):
            write_planned(planned)
    assert len(calls) > 21  # the other shards were written
    assert not planned.workspace.manifest.exists()
    repair(planned)
    assert verify(planned, deep=True).ok


@pytest.mark.parametrize("suffix", [".jpg", ".json"])
def test_edit_of_the_same_size(planned: Run, data: Path, suffix: str) -> None:
    path = next(iter(sorted(data.rglob(f"*{suffix}"))))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # of a JSON: a letter of the caption
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))  # however coarse the clock is
    with pytest.raises(StageError, match=rf"{path.parent.name}/{path.stem}\S* changed since"):
        write_planned(planned)
    assert not planned.workspace.manifest.exists()


def test_moved_source_is_the_same(planned: Run, data: Path) -> None:
    """Modification times move with the files; names of folders do not count."""
    elsewhere = data.with_name("elsewhere")
    data.rename(elsewhere)
    data.symlink_to(elsewhere)
    write_planned(planned)
    assert verify(planned, deep=True).ok


@pytest.mark.parametrize(
    ("section", "name", "value", "stages"),
    [
        ("model", "max_pixels", 28 * 28 * 32, (measure, plan_index, write_planned)),
        ("engine", "samples_per_part", 4, ()),
        ("pack", "seed", 1, (plan_index, write_planned)),
        ("pack", "strategy", "best_fit_decreasing", (plan_index, write_planned)),
        ("output", "packs_per_shard", 3, (write_planned,)),
        ("output", "key_prefix", "x", (write_planned,)),
        ("output", "layout", "references", (plan_index, write_planned)),
    ],
)
def test_changed_config_is_named(
    data: Path,
    tmp_path: Path,
    section: str,
    name: str,
    value: Any,
    stages: tuple[Callable[[Run], object], ...],
) -> None:
    """On resuming: a stage that the field takes part in refuses it by name, the others go on."""
    run = packed_run(data, tmp_path / "out")
    run.workspace.manifest.unlink()
    run.workspace.fragment("train-000001").unlink()
    changed = make_run(data, tmp_path / "out", **{section: {name: value}})
    for verb in (measure, plan_index, write_planned):
        if verb in stages:
            with pytest.raises(StageError, match=rf"{section}\.{name} was "):
                verb(changed)
        else:
            verb(changed)


def test_two_launches_at_once(data: Path, tmp_path: Path) -> None:
    run = make_run(data, tmp_path / "out")
    config = config_file(tmp_path / "config.yaml", run.config)
    with run.workspace.lock():
        second = CliRunner().invoke(cli, ["run", str(config)])
        status = CliRunner().invoke(cli, ["status", str(config)])  # may look on
    assert isinstance(second.exception, StageError)
    assert str(second.exception).startswith("another run is working on output")
    assert status.output == "measure   not begun\nplan      not done\n"


def test_temporaries_of_living_writers_stay(tmp_path: Path) -> None:
    with files.atomic_file(tmp_path / "a") as file:
        file.write(b"being written")
        (tmp_path / "b.0123.tmp").write_bytes(b"left by a killed process")
        remove_temporaries(tmp_path)
        assert [path.name[:2] for path in tmp_path.iterdir()] == ["a."]
    assert (tmp_path / "a").read_bytes() == b"being written"
    write_atomically(tmp_path / "a", b"again")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_undisturbed_files_are_compared(planned: Run) -> None:
    """The comparison of the kill test sees a changed file, a missing one, and a leftover."""
    write_planned(planned)
    root = planned.workspace.root
    expected = kill_test.content(root)
    assert kill_test.differences(expected, expected, complete=True) == []
    assert shard_files(planned).keys() <= expected.keys()
    (root / "train-000000.tar").write_bytes(b"half")
    (root / "train-000001.tar").unlink()
    (root / "train-000002.tar.x.tmp").touch()
    found = kill_test.content(root)
    assert kill_test.differences(found, expected, complete=False) == ["train-000000.tar"]
    assert kill_test.differences(found, expected, complete=True) == [
        "train-000000.tar",
        "train-000000.tar",
        "train-000001.tar",
        "train-000002.tar.x.tmp",
    ]


def test_lock_of_an_output_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever only looks can hold it, and others see that."""
    path = tmp_path / "lock"
    path.touch()

    def open_to_read(name: Path, mode: str) -> Any:
        if mode != "rb":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return name.open("rb")

    monkeypatch.setattr(files, "open", open_to_read, raising=False)
    with (
        files.hold_lock(path, "output"),
        pytest.raises(StageError, match="another run is working on output"),
        files.hold_lock(path, "output"),
    ):
        pass
