"""A recorded verdict is taken exactly where nothing that it depends on has changed."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offline_packing
from offline_packing.engines.slurm_array import SlurmEngine
from offline_packing.errors import StageError
from offline_packing.report.report import report
from offline_packing.runs.run import Run
from offline_packing.storage.files import seal, to_json
from offline_packing.upkeep.status import status
from offline_packing.verify import verdict
from offline_packing.verify.verdict import check, known_verdict
from offline_packing.verify.verify import Drawn, discard
from tests.helpers.command import Command, invoke
from tests.helpers.datasets import captioning_pairs, config_file, pack_all, packed_run
from tests.helpers.object_store import ObjectStore
from tests.helpers.outputs import files_of, flip_byte, repair
from tests.world import World, copy_of

LINE = re.compile(
    r"verify: complete on \d{4}-\d\d-\d\d \d\d:\d\d UTC( \(deep\))?, nothing changed since; "
    r"`offline-packing verify` reads all again"
)


OUTPUT = {"split": {"train": 0.7, "val": 0.3}, "shards_per_folder": 2, "packs_per_shard": 1}
SECTIONS: dict[str, Any] = {"output": OUTPUT, "pack": {"seq_length": 256}}


@pytest.fixture
def run(world: World, tmp_path: Path) -> Run:
    """Packs in two splits and folders, which a test may change."""
    return copy_of(world.run("few captions", **SECTIONS), tmp_path / "out")


def holds(run: Run, *, deep: bool = False) -> bool:
    return known_verdict(run, deep=deep) is not None


def flip_unseen(path: Path) -> None:
    """Change a byte, and restore the times that a process can set."""
    before = path.stat()
    flip_byte(path, before.st_size // 2)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def grow(path: Path) -> None:
    """Append a byte, and restore the time."""
    before = path.stat()
    with path.open("ab") as file:
        file.write(b"\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_copy(path: Path) -> None:
    """The same bytes and times in another file."""
    shutil.copy2(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "size": grow,
    "time": lambda path: os.utime(path, ns=(0, path.stat().st_mtime_ns + 1)),
    "content": flip_unseen,
    "inode": replace_by_copy,
    "lost": Path.unlink,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_shard_is_read_again(run: Run, change: Callable[[Path], None]) -> None:
    assert check(run).ok
    assert holds(run)
    change(run.workspace.root / "train-0000/train-000001.tar")
    assert not holds(run)


def test_every_file_that_verify_reads_counts(run: Run) -> None:
    """All but the files that it does not read, such as those of others."""
    report(run)
    check(run)
    root = run.workspace.root
    (root / "notes.txt").write_text("of somebody")
    counted = {name for name in files_of(root) if "/report/" not in name and name != "notes.txt"}
    assert len(counted) > 30
    for name in files_of(root):
        times = (root / name).stat()
        assert holds(run)
        os.utime(root / name, ns=(0, 0))
        assert holds(run) is (name not in counted), name
        os.utime(root / name, ns=(times.st_atime_ns, times.st_mtime_ns))
        if name in counted:  # its time of change is another one
            assert not holds(run)
            check(run)


def test_what_else_it_depends_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    check(run)

    def of(**output: Any) -> Run:
        changed = run.config.output.model_copy(update=output)
        return replace(run, config=run.config.model_copy(update={"output": changed}))

    assert holds(of(overwrite=True))
    assert not holds(of(split_seed=1))
    assert not holds(replace(run, accept_mismatch=frozenset({"modification_time"})))
    versions = verdict.library_versions()
    monkeypatch.setattr(verdict, "library_versions", lambda: versions | {"offline-packing": "0"})
    assert not holds(run)
    monkeypatch.undo()
    assert holds(run)
    flip_byte(run.workspace.verdict, 50)
    assert not holds(run)


NO_VERDICTS: list[Callable[[Any], Any]] = [
    lambda _: {},
    lambda _: {"deep": True},
    lambda found: {**found, "deep": "maybe"},
    lambda found: {**found, "time": "yesterday"},
    lambda found: {**found, "depends_on": []},
    lambda found: {**found, "result": {"num_packs": "many"}},
    lambda found: {**found, "result": {"records": -1}},
]


def test_what_is_no_verdict_is_damage(run: Run, tmp_path: Path) -> None:
    """It is moved, or written again by the check that does not take it."""
    config, path = config_file(tmp_path / "pack.yaml", run.config), run.workspace.verdict
    assert "problems        0" in invoke("run", config).stdout
    whole = json.loads(path.read_bytes())
    del whole["xxh3_128_of_this"]
    for change in NO_VERDICTS:
        for content in (change(whole), seal(change(whole))):
            path.write_bytes(to_json(content))
            assert not holds(run)
    spoiled = path.read_bytes()
    for verb in ("run", "verify", "verify --discard"):
        for spoil in (lambda: path.write_bytes(spoiled), path.mkdir):
            path.unlink(missing_ok=True)
            spoil()
            said = invoke(*verb.split(), config).stdout
            if verb == "verify --discard":
                assert "verdict.json is not what was written" in said
                assert not path.exists()
                said = invoke("run", config).stdout
            assert "problems        0" in said
            assert holds(run)


def test_deep_and_shallow(tmp_path: Path) -> None:
    run = packed_run(captioning_pairs(tmp_path / "data", 16), tmp_path / "out", **SECTIONS)
    check(run)
    assert (holds(run), holds(run, deep=True)) == (True, False)
    found = check(run, deep=True)
    known = known_verdict(run, deep=False)
    assert known is not None
    assert known.deep
    assert known.result == found
    assert check(run).ok  # which does not replace it
    assert known_verdict(run, deep=True) == known
    os.utime(Path(run.config.source[0].path) / "part0/000000.png")  # shallow ones do not read it
    assert (holds(run), holds(run, deep=True)) == (True, False)
    assert check(run, deep=True).ok
    assert holds(run, deep=True)


def test_media_that_packs_refer_to_count(tmp_path: Path) -> None:
    root = captioning_pairs(tmp_path / "data", 8)
    run = packed_run(root, tmp_path / "out", output={"layout": "indexed"})
    check(run)
    assert holds(run)
    os.utime(root / "part0/000000.png")
    assert not holds(run)


def test_checks_of_a_part_record_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.workspace.verdict
    monkeypatch.setenv("PACKING_RANK", "0")
    monkeypatch.setenv("PACKING_WORLD_SIZE", "1")
    shared = replace(run, engine=SlurmEngine(0))
    parts: list[tuple[Run, dict[str, Any]]] = [
        (run, {"hash_only": True}),
        (run, {"drawn": Drawn(0.999)}),
        (shared, {}),
    ]
    for one, options in parts:
        assert check(one, **options).ok
        assert not path.exists()
    check(run)
    before = path.read_bytes()
    for one, options in parts:
        assert check(one, **options).ok
        assert path.read_bytes() == before
    assert holds(shared)
    shard = run.workspace.root / "train-0000/train-000001.tar"
    shard.write_bytes(shard.read_bytes().replace(b'"num_tokens":[', b'"num_tokens":[1', 1))
    for one, options in parts:
        path.write_bytes(before)
        assert not check(one, **options).ok
        assert not path.exists()


def test_a_change_or_a_kill_during_the_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    true_verify, shard = verdict.verify, run.workspace.root / "train-0000/train-000001.tar"

    def change_meanwhile(*arguments: Any, **options: Any) -> Any:
        found = true_verify(*arguments, **options)
        flip_unseen(shard)
        return found

    def be_killed(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(verdict, "verify", change_meanwhile)
    assert check(run).ok
    assert not holds(run)
    flip_unseen(shard)
    monkeypatch.setattr(verdict, "verify", true_verify)
    check(run)
    monkeypatch.setattr(verdict, "verify", be_killed)
    with pytest.raises(KeyboardInterrupt):
        check(run)
    assert holds(run)


def test_an_output_that_is_read_only(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(verdict, "write_atomically", refuse)
    assert check(run).ok
    assert "verdict.json is left as it is: " in caplog.text


def test_damage_that_no_time_shows(run: Run, tmp_path: Path, command: Command) -> None:
    """A byte that the disk changed: `run` cannot know, `verify` finds it, and then `run` knows."""
    config = config_file(tmp_path / "pack.yaml", run.config)
    first = invoke("run", config).stdout
    assert "problems        0" in first
    again = invoke("run", config).stdout
    assert LINE.search(again)
    assert "problems" not in again
    assert LINE.search(invoke("run", config, "--dry-run").stdout)
    assert "problems" in invoke("run", config, "--deep").stdout
    assert "UTC (deep), nothing changed" in invoke("run", config).stdout
    assert "UTC (deep), nothing changed" in invoke("run", "--deep", config).stdout
    assert "complete: 16 samples" in status(run)
    path = run.workspace.root / "train-0000/train-000001.tar"
    true_stamp = verdict.file_stamps(path.parent)[path.name]
    flip_unseen(path)
    true_stamps = verdict.file_stamps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            verdict,
            "file_stamps",
            lambda at: true_stamps(at) | ({path.name: true_stamp} if at == path.parent else {}),
        )
        assert LINE.search(invoke("run", config).stdout)
        code, out, error = command("verify", config)
        assert (code, "its hash differs" in out) == (1, True), error
        assert not run.workspace.verdict.exists()
        code, out, error = command("run", config)
        assert (code, "its hash differs" in out) == (1, True), error
    with pytest.raises(StageError, match="1 problems; 1 of damaged files"):
        invoke("run", config)
    assert path.name in repair(run)
    assert "problems        0" in invoke("run", config).stdout
    assert LINE.search(invoke("run", config).stdout)


def test_discard_removes_it(run: Run) -> None:
    """A repair that fails puts the damaged file back, perhaps with its times."""
    check(run)
    assert discard(run) == "nothing is damaged"
    assert holds(run)
    flip_unseen(run.workspace.root / "train-0000/train-000001.tar")
    discard(run)
    assert not run.workspace.verdict.exists()


def test_pack_takes_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = offline_packing.pack(run.config, deep=True)
    monkeypatch.setattr(verdict, "verify", lambda *_, **__: pytest.fail("it reads again"))
    assert offline_packing.pack(run.config).verified == first.verified
    assert offline_packing.pack(run.config, deep=True).verified == first.verified
    moved = tmp_path / "moved"
    run.workspace.root.rename(moved)  # the same files
    output = run.config.output.model_copy(update={"path": str(moved)})
    there = run.config.model_copy(update={"output": output})
    assert offline_packing.pack(there).verified == first.verified
    shutil.copytree(moved, run.workspace.root)
    assert not holds(run)


def test_objects(world: World, object_store: ObjectStore, bucket: str) -> None:
    """By ETag and size, with a request per folder, not per object."""
    sections = {**SECTIONS, "output": {"packs_per_shard": 1}}
    run = copy_of(world.run("few captions", **sections), f"{bucket}/out")
    assert check(run).ok
    assert len(object_store.keys(f"{bucket}/out")) > 30
    object_store.set_faults()
    assert holds(run)
    assert sum(object_store.counts().values()) < 20
    pack_all(run)
    assert holds(run)
    name, key = bucket.removeprefix("s3://"), "out/train-000001.tar"
    data = object_store.read(f"{bucket}/{key}")
    object_store.client.put_object(Bucket=name, Key=key, Body=data)
    assert holds(run)
    object_store.client.put_object(Bucket=name, Key=key, Body=data[:-1] + b"x")
    assert not holds(run)
    assert not check(run).ok
    assert "out/_packing/verdict.json" not in object_store.keys(bucket)


def test_remote_sources_and_storages_without_tags_are_read_again(
    tmp_path: Path, object_store: ObjectStore, bucket: str
) -> None:
    root = captioning_pairs(tmp_path / "data", 4)
    object_store.put_folder(root, f"{bucket}/data")
    source = {"format": "pairs", "path": f"{bucket}/data", "task": "captioning"}
    run = packed_run(source, tmp_path / "out")
    assert check(run, deep=True).ok
    assert (holds(run), holds(run, deep=True)) == (True, False)
    in_memory = copy_of(run, f"memory://{tmp_path.name}/out")
    assert check(in_memory).ok
    assert not holds(in_memory)
