"""append, status, retry: more data without touching the old, and back to what was written."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron.energon import WorkerConfig, get_loader

from offline_packing.engines.slurm_array import SlurmEngine
from offline_packing.errors import StageError
from offline_packing.layouts.energon_metadata import index_pack_folder
from offline_packing.measure import measure as measure_module
from offline_packing.plan import plan as plan_module
from offline_packing.runs import manifest as manifest_module
from offline_packing.runs.run import Stage
from offline_packing.upkeep.append import append
from offline_packing.upkeep.retry import retry
from offline_packing.upkeep.status import status
from offline_packing.verify.verify import verify
from offline_packing.write import write as write_module
from offline_packing.write.write import write_shard
from task_encoders.packed_task_encoder import (
    Qwen2VLTaskEncoder,
    get_packed_train_dataset,
    get_packed_val_dataset,
)
from task_encoders.settings import PackingSettings
from tests.helpers.command import invoke
from tests.helpers.datasets import captioning_pairs, make_config, make_stage, pack_all
from tests.helpers.faults import KilledError, killing
from tests.helpers.outputs import copy_tars, flip_byte, shard_files, sqlite_rows

PARTS = {"samples_per_part": 4}
SPLIT = {"split": {"train": 0.7, "val": 0.3}}


@pytest.fixture
def grown(tmp_path: Path) -> tuple[Stage, dict[str, bytes]]:
    """A complete output whose source has grown by 15 samples since; its shards so far."""
    root = captioning_pairs(tmp_path / "data", 25)
    stage = make_stage(root, tmp_path / "out", output=SPLIT, engine=PARTS)
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


@pytest.mark.parametrize("stop", ["measure", "plan", "write", "manifest"])
def test_killed_anywhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: str,
    grown: tuple[Stage, dict[str, bytes]],
) -> None:
    """Stopped in any stage of an append, and run again: the undisturbed append's files."""
    stage, _ = grown
    shutil.copytree(stage.workspace.root, tmp_path / "undisturbed")
    undisturbed = replace(
        stage,
        config=make_config(tmp_path / "data", tmp_path / "undisturbed", output=SPLIT, engine=PARTS),
    )
    append(undisturbed)
    module, name = {
        "measure": (measure_module, "measure_part"),
        "plan": (plan_module, "write_atomically"),
        "write": (write_module, "write_shard"),
        "manifest": (manifest_module, "write_atomically"),
    }[stop]
    with monkeypatch.context() as patch:
        after = 0 if stop == "manifest" else 1
        patch.setattr(module, name, killing(getattr(module, name), after))
        with pytest.raises(KilledError):
            append(stage)
    append(stage)
    names = ("_packing/append-0001", "manifest.json", "train-000000.tar")
    for name in names:
        assert (stage.workspace.root / name).exists()
    found, expected = (
        {
            str(path.relative_to(root)): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file() and path.suffix != ".sqlite"
        }
        for root in (stage.workspace.root, undisturbed.workspace.root)
    )
    assert found == expected
    rows = [sqlite_rows(one.workspace.root, "samples") for one in (stage, undisturbed)]
    assert rows[0] == rows[1]
    assert verify(stage, deep=True).ok


def test_same_bytes_on_any_number_of_workers(tmp_path: Path) -> None:
    results = []
    for workers in (0, 1, 2):
        root = captioning_pairs(tmp_path / str(workers) / "data", 20)
        stage = make_stage(root, tmp_path / str(workers) / "out", engine={"workers": workers})
        with stage.engine:
            pack_all(stage)
            for count in (30, 45):
                captioning_pairs(root, count, first=count - 10 if count == 30 else 30)
                append(stage)
            assert verify(stage, deep=True).ok
        manifest = json.loads(stage.workspace.manifest.read_text())
        assert (manifest["counts"]["packed"], len(manifest["appended"])) == (45, 2)
        results.append({n: data for n, data in shard_files(stage).items() if ".tar" in n})
    assert len(results[0]) > 6
    assert results[0] == results[1] == results[2]


def test_the_loader_reads_old_and_new(grown: tuple[Stage, dict[str, bytes]]) -> None:
    stage, _ = grown
    append(stage)
    settings = PackingSettings(packed=True, vqa=False, bmr=False)
    encoder = Qwen2VLTaskEncoder(seq_length=512, max_pixels=28 * 28 * 64, settings=settings)
    options = {"worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0)}
    root = stage.workspace.root
    train = get_packed_train_dataset(root, encoder, repeat=False, **options)
    batches = [
        *get_loader(train),
        *get_loader(get_packed_val_dataset(root, encoder, **options)),
    ]
    found = [key for batch in batches for key in batch.sub_sample_keys]
    assert sorted(found) == sorted(f"part{i % 2}/{i:06d}" for i in range(40))


def test_ranks_of_an_array_verify_it(
    grown: tuple[Stage, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, _ = grown
    append(stage)
    monkeypatch.setenv("PACKING_WORLD_SIZE", "2")
    total = 0
    for rank in ("0", "1"):
        monkeypatch.setenv("PACKING_RANK", rank)
        result = verify(replace(stage, engine=SlurmEngine(0)), deep=True)
        assert result.ok, result.problems
        total += result.num_samples
    assert total == 40


def test_commands(tmp_path: Path) -> None:
    """Pack, let the source grow, append, append again: as a user does it."""
    root = captioning_pairs(tmp_path / "data", 25)
    path = tmp_path / "pack.yaml"
    path.write_text(
        f"source: {{format: pairs, path: {root}, task: captioning}}\n"
        "model: {max_pixels: 50176}\npack: {seq_length: 512}\n"
        f"output: {{path: {tmp_path}/out}}\nengine: {{workers: 0}}\n"
    )
    invoke("run", path, "--quiet")
    assert "no new samples: " in invoke("append", path, "--quiet").stdout
    captioning_pairs(root, 40, first=25)
    expected = f"would measure 15 new records of {root}\n"
    assert invoke("append", path, "--dry-run").stdout == expected
    assert "holds 40 samples" in invoke("append", path, "--quiet").stdout
    assert "append 1 measure   done: 15 samples" in invoke("status", path).stdout
    assert "would check 40 samples" in invoke("verify", path, "--dry-run").stdout
    assert "40 packed, 0 set aside" in invoke("verify", "--deep", path, "--quiet").stdout
    assert "wrote 0 damaged shards" in invoke("retry", path, "--quiet").stdout


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
    assert retry(stage) == (
        "wrote 2 damaged shards again: train-000001.tar, train-000002.tar; and .nv-meta/split.yaml"
    )
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
        from offline_packing.measure.measure import measure
        from offline_packing.plan.plan import plan
        from offline_packing.write.write import write

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
