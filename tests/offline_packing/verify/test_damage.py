"""Damage of every kind, in any file of a finished output: verify names it, and it is made again
byte for byte, or refused with the true reason."""

import contextlib
import os
import random
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from offline_packing.cli.commands import cli
from offline_packing.errors import ConfigError, DamagedError, StageError
from offline_packing.layouts.energon_metadata import hash_metadata
from offline_packing.measure.measure import measure
from offline_packing.report.report import report
from offline_packing.runs.manifest import read_manifest
from offline_packing.runs.repair import is_repairing
from offline_packing.runs.run import Run
from offline_packing.storage.files import hash_file
from offline_packing.verify.verdict import check
from offline_packing.verify.verify import discard, find_all_damage, verify
from task_encoders.storage.paths import REMEDY
from tests.helpers.command import invoke
from tests.helpers.datasets import (
    captioning_pairs,
    config_file,
    make_run,
    pack_all,
    packed_run,
    plan_index,
    write_json,
    write_planned,
)
from tests.helpers.outputs import repair
from tools.kill_test import kill_after, start

#: Damage that verify need not notice, and why.
UNCHECKED = {
    r"_packing/lock": "empty; holds the lock of a run",
    r"_packing/report/report\.(html|json)": "for people; `report` makes them anew",
    r"_packing/index/_started\.json": "read while the index is not complete only",
}
LAYOUTS = ("energon", "references", "indexed", "llava_onevision")

Edit = Callable[[Path], None]


def flip(path: Path) -> None:
    """One bit; of a database, in a row: its pages have bytes that nothing is read from."""
    content = bytearray(path.read_bytes())
    place = content.rindex(b"ps_0000") if path.suffix == ".sqlite" else len(content) // 2
    content[place] ^= 1
    path.write_bytes(content)


EDITS = {"flipped": flip, "deleted": Path.unlink}


@contextmanager
def edited(path: Path, edit: Edit) -> Iterator[None]:
    """An edit that is undone."""
    before = path.read_bytes()
    edit(path)
    yield
    path.write_bytes(before)


def finish(tmp_path: Path, layout: str = "energon") -> Run:
    """An output in two splits, with samples set aside in both stages."""
    root = captioning_pairs(tmp_path / "data", 32)
    write_json(root / "part0" / "long.json", {"captions": [{"content": "red " * 900}]})
    shutil.copy(root / "part0" / "000000.png", root / "part0" / "long.png")
    (root / "part1" / "broken.json").write_text("{")
    output = {"layout": layout, "split": {"train": 0.7, "val": 0.3}}
    run = make_run(root, tmp_path / "out", output=output)
    with run.workspace.lock():
        pack_all(run)
    report(run)
    return run


@pytest.fixture(
    scope="module",
    params=[
        *LAYOUTS[:2],
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in LAYOUTS[2:]),
    ],
)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finish(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def packed(tmp_path: Path) -> Run:
    """A small output that a test may change."""
    return packed_run(captioning_pairs(tmp_path / "data", 16), tmp_path / "out")


def files_of(run: Run) -> list[Path]:
    return sorted(path for path in run.workspace.root.rglob("*") if path.is_file())


def found_in(run: Run) -> str:
    """The problems that verify reports, or its error; empty where all is well."""
    try:
        result = verify(run)
    except StageError as error:
        return str(error)
    assert result.ok is (not result.problems)
    return "\n".join(result.problems)


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_every_file_is_checked(finished: Run, edit: Edit) -> None:
    root = finished.workspace.root
    assert found_in(finished) == ""
    files = files_of(finished)
    assert len(files) > 20
    unnoticed = []
    used = set()
    for path in files:
        name = str(path.relative_to(root))
        reason = next((pattern for pattern in UNCHECKED if re.fullmatch(pattern, name)), None)
        used.add(reason)
        if reason is not None:
            continue
        with edited(path, edit):
            # A manifest that is gone makes the output one that is not complete.
            texts = [name, str(path)]
            if name == "manifest.json" and edit is Path.unlink:
                texts.append(f"no manifest in {root}; run write first")
            found = found_in(finished)
            if not any(text in found for text in texts):
                unnoticed.append((name, found))
    assert unnoticed == []
    assert used - {None} == set(UNCHECKED)
    assert found_in(finished) == ""


@pytest.mark.parametrize("content", [b"7\n", b"[]", b"", b'{"a": 1}', None])
def test_json_that_is_no_object_or_lost_its_end(packed: Run, content: bytes | None) -> None:
    """Named like any other damage, and made again."""
    workspace = packed.workspace
    fragment = workspace.fragment("train-000000")
    for path in (
        workspace.manifest,
        workspace.index_info,
        workspace.plan_info,
        workspace.started,
        fragment,
    ):
        before = path.read_bytes()
        path.write_bytes(before[:-1] if content is None else content)
        result = verify(packed)
        assert not result.ok
        assert result.num_repairable == result.num_problems
        assert path.name in result.problems[0]
        repair(packed)
        assert path.read_bytes() == before


def test_database_is_compared_by_its_rows(packed: Run) -> None:
    """Other bytes, as another version of SQLite gives them, are not damage; a missing index is."""
    path = packed.workspace.nv_meta / "index.sqlite"
    before = path.read_bytes()
    with sqlite3.connect(path, isolation_level=None) as database:
        database.execute("PRAGMA page_size = 8192")
        database.execute("VACUUM")
    database.close()
    assert path.read_bytes() != before
    assert verify(packed).ok
    with sqlite3.connect(path) as database:
        database.execute("DROP INDEX idx_samples_by_tar_and_idx")
    database.close()
    assert ".nv-meta/index.sqlite differs" in verify(packed).problems[0]
    with sqlite3.connect(path) as database:
        database.execute("UPDATE samples SET byte_offset = 0")
    database.close()
    repair(packed)
    assert verify(packed).ok


def test_no_source_is_needed(finished: Run, tmp_path: Path) -> None:
    """Neither to verify a copy, nor to repair all but shards."""
    out = tmp_path / "copy"
    shutil.copytree(finished.workspace.root, out)
    sources = [{**finished.config.source[0].model_dump(), "path": str(tmp_path / "gone")}]
    output = {"layout": finished.config.output.layout, "split": finished.config.output.split}
    copy = make_run(sources, out, output=output)
    result = verify(copy)
    assert result.ok, result.problems
    assert result.num_samples == 32
    with pytest.raises(StageError, match=r"verify --deep needs the source: .*gone"):
        verify(copy, deep=True)
    for path in (copy.workspace.plan / "sample_ids.npy", *copy.workspace.nv_meta.glob("*")):
        path.unlink()
    repair(copy)
    assert verify(copy).ok
    patterns = ("*.tar", "*.bin", "train.jsonl")
    next(path for pattern in patterns for path in out.glob(pattern)).unlink()
    with pytest.raises(StageError, match="gone"):
        repair(copy)


def test_copy_without_the_plan(packed: Run) -> None:
    shutil.rmtree(packed.workspace.packing)
    with pytest.raises(StageError, match="_packing is missing, and with it the plan"):
        verify(packed)


def test_index_of_another_source_is_not_taken(packed: Run, tmp_path: Path) -> None:
    """Measured again it is another one: index and plan stay what they were."""
    record = next((tmp_path / "data").rglob("*.json"))
    record.write_bytes(record.read_bytes().replace(b" ", b"_"))  # other tokens, the same size
    part = packed.workspace.index / "part-00000.parquet"
    flip(part)

    def content() -> dict[Path, bytes]:
        paths = packed.workspace.root.rglob("*")
        return {path: path.read_bytes() for path in paths if path.is_file()}

    before = content()
    with pytest.raises(StageError, match=rf"as recorded: .* modification time .*{record.name}"):
        repair(packed)
    after = content()
    after.pop(packed.workspace.damaged / "found.json")
    assert after == before


@pytest.mark.parametrize("name", ["sample_ids.npy", "pack_offsets.npy", "set_aside_ids.npy"])
@pytest.mark.parametrize("verb", [plan_index, write_planned, report])
def test_unreadable_plan_is_named(packed: Run, name: str, verb: Callable[[Run], Any]) -> None:
    path = packed.workspace.plan / name
    before = path.read_bytes()
    path.write_bytes(before[:8] + b"\xff\xff" + before[10:])  # the length of the header
    with pytest.raises(StageError, match=re.escape(name)):
        verb(packed)


def test_changed_plan_is_named(packed: Run) -> None:
    """An id beyond the index would be an IndexError."""
    path = packed.workspace.plan / "sample_ids.npy"
    ids = np.load(path)
    ids[3] = 1 << 20
    np.save(path, ids)
    for verb in (plan_index, write_planned, report):
        with pytest.raises(StageError, match=r"sample_ids\.npy differs from what was planned"):
            verb(packed)
    repair(packed)
    assert verify(packed).ok


#: Not recorded: empty, for people, or read while an index is unfinished only.
UNRECORDED = ("lock", "_started.json", "report.html", "report.json")
DAMAGES, KILLS = 100, 60


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pack(folder: Path, layout: str = "energon") -> Run:
    """A small output of two parts, two splits and a sample set aside."""
    root = captioning_pairs(folder / "data", 24)
    (root / "part1" / "broken.json").write_text("{")
    output = {"layout": layout, "split": {"train": 0.7, "val": 0.3}, "packs_per_shard": 1}
    return packed_run(root, folder / "out", output=output)


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


def grow(run: Run) -> None:
    source = Path(run.config.source[0].path)
    shutil.copy(source / "part0" / "000000.json", source / "part0" / "more.json")
    shutil.copy(source / "part0" / "000000.png", source / "part0" / "more.png")


def check_damage(seed: int, folder: Path) -> str:
    """One damage, and its end: repaired, or refused."""
    dice = random.Random(seed)
    layout, fate = dice.choice(LAYOUTS[:3]), dice.choice(["kept", "kept", "kept", "grown", "gone"])
    source, run = folder / "data", pack(folder, layout)
    expected = content(run.workspace.root)
    done = damage(run, dice)
    damaged = content(run.workspace.root)
    case = (seed, layout, fate, done)
    if fate == "grown":
        grow(run)
    elif fate == "gone":
        source.rename(folder / "gone")
    found = {one.name for one in find_all_damage(run)}
    if "manifest.json" not in done or done["manifest.json"] != "unlink":
        assert found & {*done}, case
    discard(run)
    apart = content(run.workspace.root)
    moved = {name.removeprefix("_packing/damaged/"): one for name, one in apart.items()}
    assert all(moved.get(name) == one for name, one in damaged.items()), case  # nothing is deleted
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
        return "repaired"
    assert wrong <= {*done} | found, case
    return "refused" if wrong else "repaired"


@pytest.mark.parametrize("seed", range(6))
def test_damage(seed: int, tmp_path: Path) -> None:
    check_damage(seed, tmp_path)


@pytest.mark.exhaustive
def test_many_damages(tmp_path: Path) -> None:
    ends = [check_damage(seed, tmp_path / f"{seed}") for seed in range(DAMAGES)]
    assert ends.count("repaired") > DAMAGES / 2
    assert ends.count("refused") > 0


def check_kill(seed: int, folder: Path) -> None:
    """Kill discard or the run after it, once or more; the rest of both ends with the same bytes."""
    dice = random.Random(seed)
    run = pack(folder, dice.choice(LAYOUTS[:3]))
    expected = content(run.workspace.root)
    damage(run, dice)
    for _ in range(dice.choice([1, 1, 2])):
        kill_after(start(lambda: repair(run)), dice.uniform(0, 0.4))
    with contextlib.suppress(DamagedError):  # killed before all that is damaged was moved away
        pack_all(run)
    repair(run)
    assert content(run.workspace.root) == expected, seed
    assert verify(run).ok, seed


@pytest.mark.parametrize("seed", range(3))
def test_kill(seed: int, tmp_path: Path) -> None:
    check_kill(seed, tmp_path)


@pytest.mark.exhaustive
def test_many_kills(tmp_path: Path) -> None:
    for seed in range(KILLS):
        check_kill(seed, tmp_path / f"{seed}")


def test_half_written_files_go_with_the_repair(tmp_path: Path) -> None:
    """Killed after the last file came back, beside the half of another."""
    run = pack(tmp_path)
    expected = content(run.workspace.root)
    loader = run.workspace.nv_meta / "sample_loader.py"
    whole = loader.read_bytes()
    flip(loader)
    discard(run)
    loader.write_bytes(whole)
    loader.with_name(f"{loader.name}.0123456789ab.tmp").write_bytes(whole[:99])
    pack_all(run)
    assert content(run.workspace.root) == expected


@pytest.mark.parametrize("layout", ["references", "indexed"])
def test_pieces_that_are_joined_go(layout: str, tmp_path: Path) -> None:
    """Killed after shards were joined, before their own files were removed."""
    run = pack(tmp_path, layout)
    expected = content(run.workspace.root)
    manifest = read_manifest(run.workspace.root)
    assert manifest is not None
    joined = {"references": "train.jsonl", "indexed": "packed_seq_dataset.bin"}[layout]
    data = (run.workspace.root / joined).read_bytes()
    piece = run.workspace.root / f"train-000000{Path(joined).suffix}"
    piece.write_bytes(data[: manifest.shards[0].bytes])
    pack_all(run)
    assert content(run.workspace.root) == expected


def test_flipped_bit_in_an_index_part_costs_that_part_only(tmp_path: Path) -> None:
    run = pack(tmp_path)
    workspace, expected = run.workspace, content(run.workspace.root)
    part = workspace.index / "part-00001.parquet"
    others = [path for path in workspace.root.rglob("*") if path.is_file() and path != part]
    inodes = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in others}
    del inodes[workspace.started]
    flip(part)
    assert discard(run).startswith("1 files moved to")
    pack_all(run)
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in inodes} == inodes
    assert not workspace.damaged.exists()
    assert content(workspace.root) == expected


def test_shard_of_a_source_that_changed(tmp_path: Path) -> None:
    """Times alone do not count; other bytes do, and the file is named."""
    run = pack(tmp_path)
    tar = run.workspace.root / "train-000001.tar"
    for path in (tmp_path / "data").rglob("*.*"):
        os.utime(path)
    flip(tar)
    repair(run)
    assert verify(run, deep=True).ok
    for path in (tmp_path / "data").rglob("*.json"):
        path.write_bytes(path.read_bytes().replace(b"red", b"der"))
    flip(tar)
    damaged = tar.read_bytes()
    with pytest.raises(StageError, match=r"\.json, .* changed since .*another shard than was rec"):
        repair(run)
    assert tar.read_bytes() == damaged
    assert is_repairing(run.workspace)


@pytest.mark.parametrize(
    "layout",
    ["energon", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in LAYOUTS[1:])],
)
def test_a_folder_in_place_of_a_file(layout: str, tmp_path: Path) -> None:
    """Moved like damage, and the file is made again, whichever verb comes first."""
    run = pack(tmp_path, layout)
    report(run)
    check(run)
    config = config_file(tmp_path / "pack.yaml", run.config)
    expected = content(run.workspace.root)
    expected.pop("_packing/verdict.json")  # holds times
    for number, path in enumerate(files_of(run)):
        if path.name in ("lock", "_started.json"):
            continue
        path.unlink()
        path.mkdir()
        if number % 2:
            (path / "inner").write_text("of somebody")
        for verb in ("run", "verify"):
            result = CliRunner().invoke(cli, [verb, str(config)])
            error = result.exception
            assert error is None or isinstance(error, StageError), (path, result.exc_info)
            assert error is None or REMEDY in f"{error}{result.output}", (path, error)
        discard(run)
        invoke("run", config)
        assert verify(run).ok, path
        found = content(run.workspace.root)
        found.pop("_packing/verdict.json")
        found = {name: one for name, one in found.items() if "damaged/" not in name}
        assert found == expected, path


def test_an_index_that_was_only_started(tmp_path: Path) -> None:
    run = make_run(captioning_pairs(tmp_path / "data", 4), tmp_path / "out")
    run.workspace.index.mkdir(parents=True)
    run.workspace.index_started.write_text("{}")
    with pytest.raises(DamagedError, match=r"_started\.json is damaged"):
        measure(run)
    assert "_packing/index/_started.json" in discard(run)
    assert measure(run).info.num_samples == 4


def test_a_folder_in_place_of_the_lock(packed: Run) -> None:
    path = packed.workspace.packing / "lock"
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(StageError, match=r"lock is a folder; remove it"), packed.workspace.lock():
        pass


def test_verify_discard_goes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pack(tmp_path)
    config = config_file(tmp_path / "pack.yaml", run.config)
    assert invoke("verify", "--discard", config).output == "nothing is damaged\n"
    flip(run.workspace.plan / "sample_ids.npy")
    assert "1 files would move to" in invoke("verify", "--discard", "--dry-run", config).output
    monkeypatch.setenv("PACKING_RANK", "0")
    monkeypatch.setenv("PACKING_WORLD_SIZE", "2")
    for other in ("--deep", "engine.name=slurm"):
        with pytest.raises(ConfigError, match="verify --discard goes alone"):
            invoke("verify", "--discard", config, other)
    with run.workspace.lock(), pytest.raises(StageError, match="another run is working on output"):
        invoke("verify", "--discard", config)
    assert "1 files moved to" in invoke("verify", "--discard", config).output
    assert "problems        0" in invoke("run", config).output
