"""Damage of every kind: found, and made again byte for byte, or refused with the true reason."""

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from offline_packing.errors import ConfigError, DamagedError, StageError
from offline_packing.layouts.energon_metadata import hash_metadata
from offline_packing.runs.manifest import read_manifest
from offline_packing.runs.repair import is_repairing
from offline_packing.runs.run import Run
from offline_packing.storage.files import hash_file
from offline_packing.verify.verify import discard, find_all_damage, verify
from task_encoders.storage.paths import REMEDY
from tests.helpers.command import invoke
from tests.helpers.datasets import captioning_pairs, pack_all, packed_run
from tests.helpers.repairs import repair
from tools.kill_test import kill_after, start

LAYOUTS = ("energon", "references", "indexed")
#: Not recorded: empty, for people, or read while an index is unfinished only.
UNRECORDED = ("lock", "_started.json", "report.html", "report.json")
DAMAGES, KILLS = 100, 60


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = data.rindex(b"ps_0000") if path.suffix == ".sqlite" else len(data) // 2
    data[place] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


EDITS: tuple[Callable[[Path], None], ...] = (flip, cut, Path.unlink)


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
        edit = dice.choice(EDITS)
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
    layout, fate = dice.choice(LAYOUTS), dice.choice(["kept", "kept", "kept", "grown", "gone"])
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
    run = pack(folder, dice.choice(LAYOUTS))
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


def test_verify_discard_goes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pack(tmp_path)
    config = tmp_path / "pack.yaml"
    config.write_text(run.config.model_dump_json())
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
