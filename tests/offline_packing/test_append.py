"""append, status, retry: more data without touching the old, and back to what was written."""

import json
from pathlib import Path
from typing import Any

import pytest

from offline_packing import write as write_module
from offline_packing.append import append
from offline_packing.energon_metadata import index_pack_folder
from offline_packing.errors import StageError
from offline_packing.retry import retry
from offline_packing.stage import Stage
from offline_packing.status import status
from offline_packing.verify import verify
from offline_packing.write import write_shard
from tests.offline_packing.datasets import captioning_pairs, make_stage, pack_all
from tests.offline_packing.test_energon_metadata import copy_tars, sqlite_rows
from tests.offline_packing.test_pipeline import KilledError, flip_byte, killing, shard_files

SPLIT = {"split": {"train": 0.7, "val": 0.3}}


@pytest.fixture
def grown(tmp_path: Path) -> tuple[Stage, dict[str, bytes]]:
    """A complete output whose source has grown by 15 samples since; its shards so far."""
    root = captioning_pairs(tmp_path / "data", 25)
    stage = make_stage(root, tmp_path / "out", output=SPLIT)
    pack_all(stage)
    before = {name: data for name, data in shard_files(stage).items() if ".tar" in name}
    (root / "part1" / "broken.json").write_text("{")
    captioning_pairs(root, 40, first=25)
    return stage, before


def test_append_leaves_the_old_shards(grown: tuple[Stage, dict[str, bytes]]) -> None:
    stage, before = grown
    with pytest.raises(StageError, match=r"source\.0\.listing"):
        pack_all(stage)
    old = json.loads(stage.workspace.manifest.read_text())
    manifest = append(stage)
    after = shard_files(stage)
    assert {name: after[name] for name in before} == before
    assert len(after) > len(before) + 1
    assert manifest["counts"]["samples"] == 41
    assert manifest["counts"]["packed"] == 40
    assert manifest["counts"]["set_aside"] == {"bad_json": 1}
    assert manifest["shards"][: len(old["shards"])] == old["shards"]
    assert {shard["split"] for shard in manifest["shards"][len(old["shards"]) :]} == {
        "train",
        "val",
    }
    assert manifest["content_hash"] != old["content_hash"]
    result = verify(stage, deep=True)
    assert result.ok, result.problems
    assert (result.num_samples, result.num_set_aside) == (40, 1)


def test_metadata_covers_old_and_new(grown: tuple[Stage, dict[str, bytes]], tmp_path: Path) -> None:
    stage, _ = grown
    append(stage)
    copy_tars(stage.workspace.root, tmp_path / "copy")
    packs = index_pack_folder(tmp_path / "copy")  # raises for a repeated key
    assert packs == sum(
        json.loads(stage.workspace.manifest.read_text())["counts"]["packs"].values()
    )
    assert len(sqlite_rows(stage.workspace.root, "samples")) == packs


def test_nothing_new(grown: tuple[Stage, dict[str, bytes]]) -> None:
    stage, _ = grown
    append(stage)
    before = shard_files(stage)
    append(stage)
    assert shard_files(stage) == before
    assert not stage.workspace.of_generation(2).stages.exists()


def test_append_of_another_source_twice(tmp_path: Path) -> None:
    stage = make_stage(captioning_pairs(tmp_path / "first", 10), tmp_path / "out")
    pack_all(stage)
    for number, name in enumerate(("second", "third")):
        root = captioning_pairs(tmp_path / name, 10, seed=number + 1)  # the same keys
        source = {"format": "pairs", "path": str(root), "task": "captioning", "name": name}
        counts = append(make_stage(source, tmp_path / "out"))["counts"]
        assert counts["packed"] == 10 * (number + 2)
    assert verify(stage, deep=True).ok
    with pytest.raises(StageError, match=r"pack\.seq_length was 512, is 256; append with the same"):
        append(make_stage(tmp_path / "first", tmp_path / "out", pack={"seq_length": 256}))


def test_killed_append_goes_on(
    grown: tuple[Stage, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, before = grown
    with monkeypatch.context() as patch:
        patch.setattr(write_module, "write_shard", killing(write_shard, 1))
        with pytest.raises(KilledError):
            append(stage)
    assert verify(stage).ok  # what was complete still is
    assert "append 1 write     1 shards written" in status(stage)
    retry(stage)
    killed = shard_files(stage)
    assert {name: killed[name] for name in before} == before
    assert verify(stage, deep=True).ok
    assert verify(stage).num_samples == 40


def test_append_needs_a_complete_output(tmp_path: Path) -> None:
    stage = make_stage(captioning_pairs(tmp_path / "data", 4), tmp_path / "out")
    with pytest.raises(StageError, match="run write first"):
        append(stage)


def test_retry_writes_damaged_shards_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make_stage(captioning_pairs(tmp_path / "data"), tmp_path / "out")
    pack_all(stage)
    before = shard_files(stage)
    root = stage.workspace.root
    kept = (root / "train-000000.tar").stat().st_ino
    flip_byte(root / "train-000001.tar", 2000)
    (root / "train-000002.tar").unlink()
    (stage.workspace.nv_meta / "split.yaml").unlink()
    assert not verify(stage).ok
    assert retry(stage) == ("wrote 2 damaged shards again: train-000001.tar, train-000002.tar")
    assert shard_files(stage) == before
    assert (root / "train-000000.tar").stat().st_ino == kept
    assert (stage.workspace.nv_meta / "split.yaml").exists()
    assert verify(stage, deep=True).ok
    assert retry(stage) == "wrote 0 damaged shards again: none"


def test_retry_refuses_other_bytes(tmp_path: Path) -> None:
    root = captioning_pairs(tmp_path / "data", 12)
    stage = make_stage(root, tmp_path / "out")
    pack_all(stage)
    for path in root.rglob("*.jpg"):
        flip_byte(path, path.stat().st_size - 10)
    for path in stage.workspace.root.glob("*.tar"):
        path.unlink()
    with pytest.raises(StageError, match="changed"):
        retry(stage)


def test_failed_shards_do_not_stop_the_others(tmp_path: Path) -> None:
    root = captioning_pairs(tmp_path / "data")
    undisturbed = make_stage(root, tmp_path / "undisturbed")
    pack_all(undisturbed)
    stage = make_stage(root, tmp_path / "out")
    hidden = root / "part0" / "000004.jpg"

    def pack_without_it(stage: Stage) -> Any:
        from offline_packing.measure import measure
        from offline_packing.plan_stage import plan
        from offline_packing.write import write

        measure(stage)
        plan(stage)
        hidden.rename(tmp_path / "hidden.jpg")
        return write(stage)

    with pytest.raises(
        StageError, match=r"1 of 3 shards could not be written; train-00000\d: .*000004"
    ):
        pack_without_it(stage)
    text = status(stage)
    assert "2 shards written, 1 failed" in text
    assert "000004.jpg" in text
    assert "complete" not in text
    (tmp_path / "hidden.jpg").rename(hidden)
    assert retry(stage) == "3 shards are complete"
    assert shard_files(stage) == shard_files(undisturbed)
    assert "complete: 40 samples" in status(stage)
    assert "0 failed" in status(stage)


def test_status_before_anything(tmp_path: Path) -> None:
    stage = make_stage(captioning_pairs(tmp_path / "data", 4), tmp_path / "out")
    assert status(stage) == "measure   not begun\nplan      not done\n"
    assert not (tmp_path / "out").exists()
