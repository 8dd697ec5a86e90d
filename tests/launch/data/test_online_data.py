"""Data as a run reads them: micro batches and their state at every step, packs as token ids, and
samples that are packed while it trains."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config import DataConfig
from launch.data.loader_state import load_state
from launch.data.micro_batches import MicroBatches, build_task_encoder
from launch.data.online_data import read_data
from launch.loop.parallel import initialize_parallel
from launch.loop.plan import plan_training
from launch.loop.setup import build_trainer
from launch.trainers.shared import open_as_measured
from offline_packing.errors import StageError
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import BMR, PACKED, VQA, PackingSettings, PackingSettingsError
from tests.helpers.packed_runs import WHOLE_VOCABULARY, losses, make_config, make_trainer
from tests.helpers.prepared_folders import (
    CRUDE_YAML,
    DATASET_YAML,
    crude_folder,
    folder_of,
    text_folder,
    write_folder,
)
from tests.world import World

NUM_PACKS = 7


@pytest.mark.parametrize("repeat", [False, True])
def test_a_state_of_any_step_gives_the_rest(repeat: bool, tmp_path: Path) -> None:
    """Across the end of an epoch, and read without running code."""
    folder = text_folder(tmp_path / "packs", NUM_PACKS)
    encoder = PackedTaskEncoder(seq_length=64, settings=PackingSettings(packed=True, bmr=True))
    config = DataConfig(path=str(folder), num_workers=0, repeat=repeat)

    def next_keys(batches: MicroBatches) -> list[str] | None:
        row = batches.next()
        return None if row is None else row.__key__

    whole = MicroBatches(config, encoder, initialize_parallel())
    states, seen = [], []
    for _ in range(NUM_PACKS + 3):
        torch.save(whole.state(), tmp_path / "state.pt")
        states.append(load_state(tmp_path / "state.pt"))
        seen.append(next_keys(whole))
    assert (seen[NUM_PACKS:] == seen[:3]) if repeat else (seen[NUM_PACKS:] == [None] * 3)
    for step, state in enumerate(states):
        restored = MicroBatches(config, encoder, initialize_parallel())
        restored.restore(state)
        assert [next_keys(restored) for _ in seen[step:]] == seen[step:], step


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


@pytest.fixture
def packed(world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (PACKED, BMR):
        monkeypatch.setenv(name, "1")
    return world.packed("bmr")


def test_variables_that_contradict_the_packs_are_refused_when_they_are_opened(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a model is read."""
    for variable in ("OFFLINE_PACKING_BMR", "OFFLINE_PACKED_DATA"):
        monkeypatch.delenv(variable)
        with pytest.raises(PackingSettingsError, match="set OFFLINE_PACKED_DATA=1 OFFLINE_PACKING"):
            open_as_measured(packed, "PackedTrainer")


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
    config = make_config(
        crude, tmp_path, data={"online": ONLINE, "repeat": False}, train={"iterations": None}
    )
    data = read_data(config.data)
    batches = MicroBatches(
        config.data, build_task_encoder(config.data, data), initialize_parallel()
    )
    rows = list(iter(batches.next, None))
    batches.close()
    keys = sorted(itertools.chain(*(row.sub_sample_keys for row in rows)))
    assert keys == [f"{number:05d}" for number in range(NUM_SAMPLES)]
    assert abs(data.num_packs - len(rows)) <= 1
    assert data.num_samples == NUM_SAMPLES
    plan = plan_training(config, [data], 1)
    assert plan.iterations == -(-data.num_packs // plan.stages[0].packs_per_step)


def test_a_run_trains_and_resumes(crude: Path, tmp_path: Path) -> None:
    def train(output: str, iterations: int) -> list[str]:
        config = make_config(
            crude,
            tmp_path / output,
            data={"online": ONLINE},
            batch={"global_batch_packs": 1},
            train={"iterations": iterations},
            schedule={"decay": "constant", "warmup": 0},
        )
        trainer, recorded, _ = make_trainer(config, accept=["train.iterations"])
        trainer.resume()
        assert trainer.run()
        return recorded.keys

    whole = train("once", 6)
    assert train("twice", 3) + train("twice", 6) == whole
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")


def test_the_seed_of_a_run_decides_the_packs(crude: Path, tmp_path: Path) -> None:
    packs = []
    for seed in (0, 0, 7):
        sections: dict[str, Any] = {
            "model": WHOLE_VOCABULARY,
            "data": {"online": ONLINE, "repeat": False},
            "train": {"seed": seed},
        }
        trainer, _ = build_trainer(make_config(crude, tmp_path, **sections), initialize_parallel())
        packs.append([row.sub_sample_keys for row in iter(trainer.stages[0].train.next, None)])
    assert packs[0] == packs[1]
    assert sorted(itertools.chain(*packs[0])) == sorted(itertools.chain(*packs[2]))
    assert list(itertools.chain(*packs[0])) != list(itertools.chain(*packs[2]))


def test_what_online_data_have_not_is_refused(crude: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.online has packs while training only: set"):
        make_config(crude, tmp_path, data={"online": ONLINE, "order": "balanced"})
    with pytest.raises(ValueError, match=r"validation\.every=0"):
        make_config(crude, tmp_path, data={"online": ONLINE}, validation={"every": 2})
    own = {"online": ONLINE, "task_encoder": "task_encoders:PackedTaskEncoder"}
    config = make_config(crude, tmp_path, data=own).data
    with pytest.raises(ValueError, match="PackedTaskEncoder' is not a subclass of Online"):
        build_task_encoder(config, read_data(config))


def test_data_without_a_usable_sample_are_one_error(tmp_path: Path) -> None:
    bad = folder_of(tmp_path / "bad", {f"{i}": {"json": b"{"} for i in range(3)}, CRUDE_YAML)
    config = make_config(bad, tmp_path, data={"online": ONLINE})
    with pytest.raises(StageError, match="none of 3 samples can be used"):
        read_data(config.data)


def test_data_that_energon_has_not_prepared_name_the_command(tmp_path: Path) -> None:
    config = make_config(tmp_path / "tars", tmp_path, data={"online": ONLINE})
    with pytest.raises(StageError, match=r"energon prepare \S+/tars --non-interactive"):
        read_data(config.data)
    split = crude_folder(tmp_path / "tars", 2, shards=1) / ".nv-meta/split.yaml"
    split.write_text("split_parts: {train: []}\nexclude: []\n")
    with pytest.raises(StageError, match="'train'; prepare it with another --split-ratio"):
        read_data(config.data)
