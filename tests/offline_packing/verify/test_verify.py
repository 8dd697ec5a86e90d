"""Damage of every kind, in any file of a finished output: verify names it, and it is made again
byte for byte, or refused with the true reason. Lengths that were measured wrongly are named too. A
recorded verdict is taken exactly where nothing that it depends on has changed."""

import contextlib
import errno
import json
import os
import random
import re
import shutil
import sqlite3
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offline_packing
from offline_packing.engines.slurm_array import SlurmEngine
from offline_packing.errors import ConfigError, DamagedError, StageError
from offline_packing.layouts.energon_metadata import hash_metadata
from offline_packing.report.report import report
from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.repair import is_repairing
from offline_packing.runs.run import Run
from offline_packing.runs.tasks import plan_shards
from offline_packing.storage import receipts
from offline_packing.storage.files import hash_file, seal, to_json
from offline_packing.storage.receipts import receipt_path
from offline_packing.verify import verdict
from offline_packing.verify.damage import find_damage
from offline_packing.verify.shard import VerifyResult
from offline_packing.verify.verdict import check, known_verdict
from offline_packing.verify.verify import Drawn, discard, verify
from task_encoders.families.base.family import FamilyEncoder
from task_encoders.sample_encoder import SampleLength
from task_encoders.samples import SourceSample
from task_encoders.storage.paths import REMEDY
from tests.helpers.command import Command, invoke
from tests.helpers.datasets import (
    captioning_pairs,
    config_file,
    index_rows,
    make_run,
    pack_all,
    packed_run,
    plan_index,
    write_planned,
)
from tests.helpers.object_store import ObjectStore
from tests.helpers.outputs import cut, files_of, flip, flip_byte, repair
from tests.world import Source, World, at, copy_of
from tools.kill_test import kill_after, start

#: An empty file that holds the lock, and pages for people, which `report` makes anew.
UNRECORDED = ("lock", "report.html", "report.json")
MEDIA = ("copy", "refer")
DAMAGES, KILLS = 100, 60

Edit = Callable[[Path], None]


def captions(folder: Path) -> Source:
    """Write captions in two parts, one of them broken."""
    (captioning_pairs(folder, 24) / "part1" / "broken.json").write_text("{")
    return {"format": "pairs", "path": str(folder), "task": "captioning"}


def in_splits(media: str = "copy") -> dict[str, Any]:
    """Return options of an output of small shards in two splits."""
    return {"media": media, "split": {"train": 0.7, "val": 0.3}, "packs_per_shard": 1}


@pytest.fixture
def packed(world: World, tmp_path: Path) -> Run:
    """Captions in one split, which a test may change."""
    return copy_of(world.run("captioning"), tmp_path / "out")


def content(root: Path) -> dict[str, str]:
    """Hash of each file; of a database, if it can be read, of its rows."""
    hashes = {}
    for path in root.rglob("*"):
        if path.is_file() and path.name != "lock":
            try:
                hashes[str(path.relative_to(root))] = hash_metadata(path)
            except StageError:
                hashes[str(path.relative_to(root))] = hash_file(path)
    return hashes


def test_every_file_is_checked(world: World, tmp_path: Path) -> None:
    output = {"media": "refer", "split": {"train": 0.7, "val": 0.3}}
    run = copy_of(world.run("captioning", output=output), tmp_path / "out")
    root = run.workspace.root
    names = [name for name in content(root) if Path(name).name not in UNRECORDED]
    assert len(names) > 20
    assert verify(run).problems == []
    for path in (root / name for name in names):
        before = path.read_bytes()
        flip(path)
        try:
            found = "\n".join(verify(run, hash_only=True).problems)
        except StageError as error:
            found = str(error)
        assert str(path.relative_to(root)) in found, (path, found)
        path.write_bytes(before)
    assert verify(run).problems == []


def test_database_is_compared_by_its_rows(packed: Run) -> None:
    """Other bytes, as another version of SQLite gives them, are not damage; a missing index is."""
    path = packed.workspace.nv_meta / "index.sqlite"
    before = path.read_bytes()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA page_size = 8192")
        database.execute("VACUUM")
        assert path.read_bytes() != before
        assert verify(packed).ok
        database.execute("DROP INDEX idx_samples_by_tar_and_idx")
        assert ".nv-meta/index.sqlite is not what was written" in verify(packed).problems[0]
        database.execute("UPDATE samples SET byte_offset = 0")
    repair(packed)
    assert verify(packed).ok


def test_no_source_is_needed(packed: Run, tmp_path: Path) -> None:
    """Neither to verify a copy, nor to repair all but shards."""
    sources = [{**packed.config.source[0].model_dump(), "path": str(tmp_path / "gone")}]
    copy = make_run(sources, packed.workspace.root)
    result = verify(copy)
    assert result.ok, result.problems
    assert result.num_samples == 40
    with pytest.raises(StageError, match=r"verify --deep needs the source: .*gone"):
        verify(copy, deep=True)
    for path in (copy.workspace.plan / "sample_ids.npy", *copy.workspace.nv_meta.glob("*")):
        path.unlink()
    repair(copy)
    assert verify(copy).ok
    (copy.workspace.root / "train-000000.tar").unlink()
    with pytest.raises(StageError, match="gone"):
        repair(copy)
    shutil.rmtree(copy.workspace.packing)
    with pytest.raises(StageError, match="_packing is missing, and with it the plan"):
        verify(copy)


def test_a_source_that_changed(tmp_path: Path) -> None:
    """Times alone do not count. Other bytes do: the file is named, index and shards stay as they
    were, and so do the damaged ones."""
    run = packed_run(captions(tmp_path / "data"), tmp_path / "out", output=in_splits())
    damaged = (run.workspace.index / "part-00000.parquet", run.workspace.root / "train-000001.tar")
    for path in (tmp_path / "data").rglob("*.*"):
        os.utime(path)
    flip(damaged[1])
    repair(run)
    assert verify(run, deep=True).ok
    for path in (tmp_path / "data").rglob("*.json"):
        path.write_bytes(path.read_bytes().replace(b"red", b"der"))
    for path in damaged:
        flip(path)
        before = content(run.workspace.root)
        with pytest.raises(StageError, match=r"as recorded: .*( time .*json|json.* texts)"):
            repair(run)
        after = content(run.workspace.root)
        after.pop("_packing/damaged/found.json")
        assert after == before
        assert is_repairing(run.workspace)
        flip(path)
        shutil.rmtree(run.workspace.damaged)


def test_a_damaged_plan_is_named(packed: Run) -> None:
    """By every verb that reads it; an id beyond the index would be an IndexError."""
    for name in ("sample_ids.npy", "pack_offsets.npy", "set_aside_ids.npy"):
        path = packed.workspace.plan / name
        before = path.read_bytes()
        header = before[:8] + b"\xff\xff" + before[10:]  # its length
        ids = np.load(path)
        if len(ids):
            ids[-1] = 1 << 20
        np.save(path, ids)
        beyond = path.read_bytes()
        for damaged in (header, beyond)[: 1 + len(ids)]:
            path.write_bytes(damaged)
            for verb in (plan_index, write_planned, report):
                with pytest.raises(StageError, match=re.escape(name)) as caught:
                    verb(packed)
                assert damaged is header or "differs from what was planned" in str(caught.value)
        path.write_bytes(before)


def damage(run: Run, dice: random.Random) -> dict[str, str]:
    """Damage one file, or several at once: name -> what was done."""
    root = run.workspace.root
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    files = [path for path in files if path.name not in UNRECORDED]
    done = {}
    for path in dice.sample(files, dice.choice([1, 1, 2, 5])):
        edit: Edit = dice.choice([flip, cut, Path.unlink])
        edit(path)
        done[str(path.relative_to(root))] = edit.__name__
    return done


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(6, DAMAGES))]
)
def test_damage(seed: int, world: World, tmp_path: Path) -> None:
    """Repaired, or refused where the source has grown or is gone; nothing is deleted."""
    dice = random.Random(seed)
    media, fate = dice.choice(MEDIA), dice.choice(["kept", "kept", "kept", "grown", "gone"])
    source, output = tmp_path / "data", in_splits(media)
    if fate == "kept":
        run = copy_of(world.run(captions, output=output), tmp_path / "out")
    else:
        run = packed_run(captions(source), tmp_path / "out", output=output)
    expected = content(run.workspace.root)
    done = damage(run, dice)
    damaged = content(run.workspace.root)
    case = (media, fate, done)
    if fate == "grown":
        for name in ("000000.json", "000000.png"):
            shutil.copy(source / "part0" / name, source / "part0" / name.replace("000000", "more"))
    elif fate == "gone":
        source.rename(tmp_path / "gone")
    found = {*find_damage(run)}
    if done.get("manifest.json") != "unlink":
        assert found & {*done}, case
    discard(run)
    apart = content(run.workspace.root)
    moved = {name.removeprefix("_packing/damaged/"): one for name, one in apart.items()}
    assert all(moved.get(name) == one for name, one in damaged.items()), case
    intact = {name for name, one in damaged.items() if expected.get(name) == one}
    # What an index cannot give does not keep the rest from being made again.
    for attempt in range(2):
        try:
            pack_all(run)
        except StageError as error:
            text = str(error)
            assert fate != "kept", (case, text)
            if not attempt:  # afterwards a damaged file is back in its place
                assert REMEDY not in text, (case, text)
                assert "more" in text or "data" in text, (case, text)
        left = content(run.workspace.root)
        assert all(left.get(name) == expected[name] for name in intact), case
    wrong = {name for name, _ in left.items() ^ expected.items()}
    wrong = {name for name in wrong if not name.startswith("_packing/damaged")}
    if fate == "kept":
        assert not wrong, case
        assert verify(run, deep=True).ok, case
    assert wrong <= {*done} | found, case


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(3, KILLS))]
)
def test_kill(seed: int, world: World, tmp_path: Path) -> None:
    """Kill discard or the run after it, once or more; the rest of both ends with the same bytes."""
    dice = random.Random(seed)
    run = copy_of(world.run(captions, output=in_splits(dice.choice(MEDIA))), tmp_path / "out")
    expected = content(run.workspace.root)
    damage(run, dice)
    for _ in range(dice.choice([1, 1, 2])):
        kill_after(start(lambda: repair(run)), dice.uniform(0, 0.4))
    with contextlib.suppress(DamagedError):  # killed before all that is damaged was moved away
        pack_all(run)
    repair(run)
    assert content(run.workspace.root) == expected
    assert verify(run).ok


def test_a_flipped_bit_in_an_index_part_costs_that_part_only(packed: Run) -> None:
    """Half of a file that a kill left beside it goes with the repair."""
    workspace, expected = packed.workspace, content(packed.workspace.root)
    part = workspace.index / "part-00001.parquet"
    others = [path for path in workspace.root.rglob("*") if path.is_file() and path != part]
    inodes = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in others}
    flip(part)
    assert discard(packed).startswith("1 files moved to")
    loader = workspace.nv_meta / "sample_loader.py"
    loader.with_name(f"{loader.name}.0123456789ab.tmp").write_bytes(b"half")
    pack_all(packed)
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in inodes} == inodes
    assert not workspace.damaged.exists()
    assert content(workspace.root) == expected


def test_a_lost_file_that_needs_a_damaged_one(packed: Run) -> None:
    """The damaged one is named, with the remedy that makes both again."""
    expected = content(packed.workspace.root)
    (packed.workspace.nv_meta / "index.sqlite").unlink()
    cut(packed.workspace.write / "train-000000.json")
    with pytest.raises(DamagedError, match=rf"write/train-000000\.json is damaged: .*{REMEDY}$"):
        pack_all(packed)
    repair(packed)
    assert content(packed.workspace.root) == expected


def test_verify_discard_goes_alone(
    packed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_file(tmp_path / "pack.yaml", packed.config)
    assert invoke("verify", "--discard", config).output == "nothing is damaged\n"
    flip(packed.workspace.plan / "sample_ids.npy")
    assert "1 files would move to" in invoke("verify", "--discard", "--dry-run", config).output
    monkeypatch.setenv("PACKING_RANK", "0")
    monkeypatch.setenv("PACKING_WORLD_SIZE", "2")
    for other in ("--deep", "engine.name=slurm"):
        with pytest.raises(ConfigError, match="verify --discard works alone"):
            invoke("verify", "--discard", config, other)
    with packed.workspace.lock():
        assert "plan      done" in invoke("status", config).output  # may look on
        with pytest.raises(StageError, match="another run is working on output"):
            invoke("verify", "--discard", config)
    assert "1 files moved to" in invoke("verify", "--discard", config).output
    assert "problems        0" in invoke("run", config).output


def flip_bit(root: Path) -> None:
    with tarfile.open(root / "train-000001.tar") as tar:
        offset = next(m for m in tar if not m.name.endswith("json")).offset_data
    flip_byte(root / "train-000001.tar", offset + 100)


def swap_shards(root: Path) -> None:
    first, second = root / "train-000000.tar", root / "train-000001.tar"
    whole = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(whole)


def change(pattern: bytes, *others: bytes) -> Callable[[Path], None]:
    """Replace the byte after a pattern by the first of others that it is not."""

    def edit(root: Path) -> None:
        path = root / "train-000001.tar"
        data = path.read_bytes()
        place = data.index(pattern) + len(pattern)
        other = next(one for one in others if one != data[place : place + 1])
        path.write_bytes(data[:place] + other + data[place + 1 :])

    return edit


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (flip_bit, "image bytes differ from the source"),
        (swap_shards, "does not hold the packs"),
        (change(b'"num_tokens":[', b"9", b"8"), "meta.num_tokens is not what was measured"),
        (change(b'"captions":["', b"#"), "text differs from the source"),
    ],
)
def test_verify_names_the_damage(packed: Run, edit: Edit, problem: str) -> None:
    edit(packed.workspace.root)
    result = verify(packed, deep=True)
    assert not result.ok
    assert any(problem in found for found in result.problems), result.problems


def test_verify_finds_a_wrong_length(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measuring encoder that is off by one in one sample."""
    run = make_run(world.source("captioning"), tmp_path / "out")
    true_measure = FamilyEncoder.measure

    def off_by_one(encoder: FamilyEncoder, sample: SourceSample, *args: Any) -> SampleLength:
        length = true_measure(encoder, sample, *args)
        is_wrong = sample.key == "part0/000004"
        return length._replace(num_tokens=length.num_tokens + is_wrong)

    monkeypatch.setattr(FamilyEncoder, "measure", off_by_one)
    pack_all(run)
    result = verify(run, deep=True)
    assert result.num_problems == 1
    assert re.search(r"'part0/000004': encodes to \d+ tokens, measured", result.problems[0])


def test_verify_counts_hashes_and_draws(packed: Run, tmp_path: Path) -> None:
    manifest = require_manifest(packed.workspace.root)
    tokens = sum(row["num_tokens"] for row in index_rows(packed))
    assert verify(packed, deep=True) == VerifyResult(
        num_shards=len(manifest.shards),
        num_packs=manifest.counts.packs["train"],
        num_samples=40,
        num_row_tokens=tokens,
        num_set_aside=0,
        num_images=40,
        num_videos=0,
        num_tokens=tokens,
    )
    config = config_file(tmp_path / "pack.yaml", packed.config)
    assert "drawn with seed 3" in invoke("verify", config, "--samples=2", "--seed=3").output
    assert "not opened" in invoke("verify", config, "--hash-only").output
    with pytest.raises(ConfigError, match="leave out --deep and --samples"):
        invoke("verify", config, "--hash-only", "--deep")
    found = verify(packed, hash_only=True)
    assert (found.problems, found.num_samples) == ([], 40)
    flip_bit(packed.workspace.root)
    assert "its hash differs" in verify(packed, hash_only=True).problems[0]
    swap_shards(packed.workspace.root)
    problems = verify(packed, drawn=Drawn(0.999)).problems
    assert any("train-000000.tar" in one for one in problems)  # the bit is in the other


def test_samples_drawn_at_random(world: World) -> None:
    output = {"media": "refer", "split": {"train": 0.6, "val": 0.4}}
    run = world.run("captioning", output=output, pack={"seq_length": 256})
    some = verify(run, drawn=Drawn(12), deep=True)
    assert some.problems == []
    assert 12 <= some.num_samples == some.num_images < 40
    packs = open_plan(run).packs
    assert verify(run, drawn=Drawn(0.999)).num_packs == packs.num_packs > some.num_packs
    shards = plan_shards(run, open_index(run), packs)
    assert len({tuple(Drawn(12, seed).shards(packs, shards)) for seed in (0, 0, 1, 2)}) > 1


def test_a_picture_that_is_damaged_in_the_source_is_named_as_such(tmp_path: Path) -> None:
    root = captioning_pairs(tmp_path / "data", 8)
    picture = root / "part0" / "000000.png"
    flip_byte(picture, picture.stat().st_size // 2)  # shows when its pixels are read
    result = verify(packed_run(root, tmp_path / "out"), deep=True)
    assert (result.num_problems, result.num_in_source) == (1, 1)
    assert result.problems[0].endswith(
        "; the source has the same bytes: repair or remove the sample in part0/000000.png"
    )


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


def test_every_file_that_verify_reads_counts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all times and its inode; but not the files that it does not read, such as those of
    others."""
    report(run)
    found, root = check(run), run.workspace.root
    monkeypatch.setattr(verdict, "verify", lambda *_, **__: found)  # which was read once
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
    (root / "train-0000/train-000001.tar").unlink()
    assert not holds(run)


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


def test_what_is_no_verdict_is_damage(run: Run) -> None:
    """It is not taken, it is moved, and the next check writes it again."""
    check(run)
    path = receipt_path(run.workspace.packing, "verify")
    whole = json.loads(path.read_bytes())
    del whole["xxh3_128_of_this"]
    for changed in ({"facts": {"deep": True}}, {"inputs": []}):
        path.write_bytes(to_json(seal({**whole, **changed})))
        assert not holds(run)
    for _ in range(2):
        assert "verify.json is not what was written" in discard(run)
        path.mkdir()
        assert not holds(run)
    check(run)
    assert holds(run)


def test_deep_and_shallow(tmp_path: Path) -> None:
    """Shallow verdicts count the source where packs refer to it."""
    data = captioning_pairs(tmp_path / "data", 16)
    run = packed_run(data, tmp_path / "out", **SECTIONS)
    check(run)
    assert (holds(run), holds(run, deep=True)) == (True, False)
    found = check(run, deep=True)
    known = known_verdict(run, deep=False)
    assert known.deep
    assert known.result == found
    assert check(run).ok  # which does not replace it
    assert known_verdict(run, deep=True) == known
    refers = packed_run(data, tmp_path / "refers", output={"media": "refer"})
    check(refers)
    assert holds(refers)
    os.utime(data / "part0/000000.png")
    assert (holds(run), holds(run, deep=True), holds(refers)) == (True, False, False)


def test_checks_of_a_part_record_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = receipt_path(run.workspace.packing, "verify")
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

    monkeypatch.setattr(receipts, "write_atomically", refuse)
    assert check(run).ok
    assert " is left as it is: " in caplog.text


def test_what_the_commands_say_of_a_verdict(run: Run, tmp_path: Path, command: Command) -> None:
    """A byte that the disk changed: both verbs find it, and the verdict is gone."""
    config = config_file(tmp_path / "pack.yaml", run.config)
    assert "problems        0" in invoke("run", config).stdout
    again = invoke("run", config).stdout
    assert LINE.search(again)
    assert "problems" not in again
    assert LINE.search(invoke("run", config, "--dry-run").stdout)
    assert "problems" in invoke("run", config, "--deep").stdout
    assert "UTC (deep), nothing changed" in invoke("run", "--deep", config).stdout
    path = run.workspace.root / "train-0000/train-000001.tar"
    flip_unseen(path)
    for verb in ("verify", "run"):
        code, out, error = command(verb, config)
        assert (code, "its hash differs" in out) == (1, True), error
        assert error.endswith(f"1 problems; 1 of damaged files: {REMEDY}\n")
        assert not receipt_path(run.workspace.packing, "verify").exists()
    assert path.name in repair(run)
    check(run)
    assert discard(run) == "nothing is damaged"
    assert holds(run)
    flip_unseen(path)  # a repair that fails puts it back, perhaps with its times
    discard(run)
    assert not receipt_path(run.workspace.packing, "verify").exists()


def test_pack_takes_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = offline_packing.pack(run.config, deep=True)
    monkeypatch.setattr(verdict, "verify", lambda *_, **__: pytest.fail("it reads again"))
    assert offline_packing.pack(run.config).verified == first.verified
    assert offline_packing.pack(run.config, deep=True).verified == first.verified
    moved = tmp_path / "moved"
    run.workspace.root.rename(moved)  # the same files
    assert offline_packing.pack(at(run, moved).config).verified == first.verified
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
    assert sum(object_store.counts().values()) < 24
    pack_all(run)
    assert holds(run)
    name, key = bucket.removeprefix("s3://"), "out/train-000001.tar"
    data = object_store.read(f"{bucket}/{key}")
    object_store.client.put_object(Bucket=name, Key=key, Body=data)
    assert holds(run)
    object_store.client.put_object(Bucket=name, Key=key, Body=data[:-1] + b"x")
    assert not holds(run)
    assert not check(run).ok
    assert "out/_packing/verify.json" not in object_store.keys(bucket)


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
