"""An output in object storage holds the bytes of a local one."""

import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from offline_packing.report.preview import preview
from offline_packing.report.report import report
from offline_packing.runs.run import Run, Workspace
from offline_packing.storage.files import local_copy, scratch_folder, write_atomically
from offline_packing.upkeep.blend import blend
from offline_packing.upkeep.status import status
from task_encoders.storage.paths import path_of
from tests.helpers.command import Command
from tests.helpers.datasets import config_file, pack_all
from tests.helpers.object_store import Faults, ObjectStore
from tests.helpers.outputs import files_of
from tests.world import World, at


@pytest.fixture
def local(world: World) -> Run:
    """Packs in two splits and folders."""
    return world.run(
        "few captions", output={"split": {"train": 0.7, "val": 0.3}, "shards_per_folder": 2}
    )


@pytest.fixture
def remote(local: Run, bucket: str) -> Run:
    """The same, not packed yet."""
    return at(local, f"{bucket}/out")


def test_an_output_in_a_bucket(
    local: Run,
    remote: Run,
    object_store: ObjectStore,
    bucket: str,
    tmp_path: Path,
    command: Command,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bucket that denies writes half-way: one line, and a run that goes on when it may; where a
    tenth of the requests fail, with a line with how many were repeated. Then it is looked at."""
    config, name = config_file(tmp_path / "pack.yaml", remote.config), bucket.removeprefix("s3://")
    assert "measure   not begun" in status(remote)
    for writes in (2, 12):
        object_store.set_faults(Faults(writes_allowed=writes))
        code, _, said = command("run", "--quiet", config)
        object_store.set_faults()
        assert code == 1
        assert re.fullmatch(
            rf"error: {bucket}/out/\S+ cannot be written: .*; check that the bucket exists, .*\n",
            said.splitlines(keepends=True)[-1],
        )
        assert "test-secret" not in said
        assert object_store.unfinished_uploads(name) == []
    object_store.fail(0.1)
    with caplog.at_level("INFO"), remote.workspace.lock():
        pack_all(remote)
    assert object_store.counts()["failed"] > 3
    object_store.set_faults()
    assert re.search(r"s3://.*/out: \d+ requests failed and were made again", caplog.text)
    assert object_store.objects(f"{bucket}/out") == files_of(local.workspace.root)
    assert object_store.unfinished_uploads(name) == []
    report(remote)
    assert "complete: 16 samples" in (text := status(remote))
    assert f"report    {bucket}/out/_packing/report/report.html" in text
    assert len(list(preview(remote, packs=["0"]))) == 1
    assert f"{name}/out" in blend([path_of(f"{bucket}/out")])  # as msc://, which Energon reads


def test_scratch_of_a_killed_run_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    workspace = Workspace(path_of(f"{bucket}/out"))
    folders = (workspace.write, workspace.write / "0-9", workspace.skip, workspace.unpacked)
    for folder in map(scratch_folder, folders):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "left").touch()
    assert len(list(tmp_path.rglob("left"))) == len(folders)
    with workspace.lock():
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        scratch_folder(workspace.write).mkdir(parents=True)
    assert list(tmp_path.glob("*/*")) == []


KILLED = """
import os, signal, sys, tempfile
from pathlib import Path
from offline_packing.storage.files import local_copy, write_atomically
from task_encoders.storage.paths import path_of

object = path_of("memory://folder/a.npy")
write_atomically(object, b"content")
with local_copy(object):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_scratch_of_remote_outputs_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that somebody else made, or may enter, is not taken; and the next copy removes what
    a killed process left, but not the copies that are in use."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    output = path_of("memory://folder/out/_packing")
    prefix = f"offline-packing-{os.getuid()}"
    (tmp_path / prefix).mkdir(mode=0o777)
    (tmp_path / f"{prefix}-0").mkdir(mode=0o755)
    (tmp_path / f"{prefix}-1").symlink_to(tmp_path)
    scratch = scratch_folder(output)
    own = scratch.parent
    assert own.parent == tmp_path
    assert re.fullmatch(rf"{prefix}-[a-z0-9_]{{8}}", own.name)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert scratch_folder(output) == scratch
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", KILLED], env=environment).returncode == -9
    assert [path.name for path in tmp_path.rglob("*.npy")] == ["a.npy"]
    remote = path_of("memory://folder/b.npy")
    write_atomically(remote, b"content")
    with local_copy(remote) as first, local_copy(remote) as second:
        assert first.read_bytes() == second.read_bytes() == b"content"
        assert sorted(tmp_path.rglob("*.npy")) == sorted([first, second])
        assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert list(tmp_path.rglob("*.npy")) == []
