"""Data as a run reads them: packs without a usable sample, and samples that are packed while it
trains."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.config import DataConfig
from launch.data.micro_batches import MicroBatches, build_task_encoder
from launch.data.online_data import read_data
from launch.loop.parallel import initialize_parallel
from launch.loop.plan import plan_training
from offline_packing.errors import StageError
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import BMR, PACKED, VQA, PackingSettings
from tests.helpers.packed_runs import losses, make_config, trained
from tests.helpers.prepared_folders import (
    CRUDE_YAML,
    DATASET_YAML,
    crude_folder,
    folder_of,
    write_folder,
)
from tests.helpers.rank_processes import RankError, run_ranks


def test_a_pack_without_a_usable_sample_is_a_row_without_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So that ranks keep in step; many in a row end the run."""
    good = {"images": [[]], "prompt": [["Say it."]], "captions": [["It."]]}
    bad = {**good, "captions": [["It.", "Again."]]}
    for name, kinds in (("some", "gbg"), ("all", "b")):
        records = [{"g": good, "b": bad}[kind] for kind in kinds]
        packs = {f"{i:02d}": {"json": json.dumps(r).encode()} for i, r in enumerate(records)}
        write_folder(tmp_path / name, [packs], DATASET_YAML)
    encoder = PackedTaskEncoder(seq_length=64, settings=PackingSettings(packed=True, bmr=True))
    config = DataConfig(path=str(tmp_path / "some"), num_workers=0, repeat=False)
    batches = MicroBatches(config, encoder, initialize_parallel())
    rows = [row for row in iter(batches.next, None) if row is not None]
    assert [row.num_tokens for row in rows] == [25, 0, 25]
    assert [float(row.loss_mask.sum()) > 0 for row in rows] == [True, False, True]
    assert "left out, in pack 01 or before: 01: bad_record" in caplog.text
    config = DataConfig(path=str(tmp_path / "all"), num_workers=0)
    batches = MicroBatches(config, encoder, initialize_parallel())
    with pytest.raises(StageError, match="100 consecutive rows have no usable sample: 00: "):
        list(iter(batches.next, None))


NUM_SAMPLES = 40
ONLINE: dict[str, Any] = {"seq_length": 512, "buffer": 16, "model": {"max_pixels": 28 * 28 * 64}}


@pytest.fixture(autouse=True)
def _unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PACKED, VQA, BMR):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def crude(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crude_folder(tmp_path_factory.mktemp("crude") / "crude", NUM_SAMPLES)


def test_the_steps_of_an_epoch_are_estimated(crude: Path, tmp_path: Path) -> None:
    """And the seed of a run decides its packs."""
    sections: dict[str, Any] = {"data": {"online": ONLINE, "repeat": False}}
    config = make_config(crude, tmp_path, train={"iterations": None}, **sections)
    data = read_data(config.data)
    encoder = build_task_encoder(config.data, data)

    def packs_of(seed: int) -> list[list[str]]:
        batches = MicroBatches(config.data, encoder, initialize_parallel(), seed=seed)
        rows = [row.sub_sample_keys for row in iter(batches.next, None) if row is not None]
        batches.close()
        return rows

    packs, other = packs_of(0), packs_of(7)
    for rows in (packs, other):
        assert sorted(itertools.chain(*rows)) == [f"{n:05d}" for n in range(NUM_SAMPLES)]
    assert packs_of(0) == packs != other
    assert abs(data.num_packs - len(packs)) <= 1
    assert data.samples_per_pack == pytest.approx(NUM_SAMPLES / data.num_packs, rel=0.1)
    plan = plan_training(config, [data], 1)
    assert plan.iterations == -(-data.num_packs // plan.stages[0].packs_per_step)


def train(crude: Path, output: Path, iterations: int, context: int = 1) -> list[str]:
    config = make_config(
        crude,
        output,
        data={"online": ONLINE},
        batch={"global_batch_packs": 2 // context},
        train={"iterations": iterations},
        schedule={"decay": "constant", "warmup": 0},
        parallel={"context": context},
    )
    return trained(config, "train.iterations", "batch.global_batch_packs").keys


def test_a_run_trains_and_resumes(crude: Path, tmp_path: Path) -> None:
    """Not on other ranks, in whose loaders other samples would wait."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    whole = train(crude, once, 4)
    assert train(crude, twice, 2) + train(crude, twice, 4) == whole
    assert losses(twice) == losses(once)
    for context, ranks in ((1, "2 × 1"), (2, "1 × 2")):
        said = f"of 1 × 1 data × context parallel ranks, but {ranks} are running; resume with the"
        with pytest.raises(RankError, match=said):
            run_ranks(2, tmp_path / ranks, train, crude, twice, 4, context)


def test_data_that_cannot_be_packed_are_refused(crude: Path, tmp_path: Path) -> None:
    def config_of(path: Path, **own: Any) -> DataConfig:
        return make_config(path, tmp_path, data={"online": ONLINE, **own}).data

    def refused(message: str) -> None:
        with pytest.raises(StageError, match=message):
            read_data(config_of(tmp_path / "tars"))

    config = config_of(crude, task_encoder="task_encoders:PackedTaskEncoder")
    with pytest.raises(ValueError, match="PackedTaskEncoder' is not a subclass of Online"):
        build_task_encoder(config, read_data(config))
    refused(r"energon prepare \S+/tars --non-interactive")
    folder = crude_folder(tmp_path / "tars", 2, shards=1)
    (folder / ".nv-meta/split.yaml").write_text("split_parts: {train: []}\nexclude: []\n")
    refused("'train'; prepare it with another --split-ratio")
    shutil.rmtree(folder)
    folder_of(folder, {f"{i}": {"json": b"{"} for i in range(3)}, CRUDE_YAML)
    refused("none of 3 samples can be used")
