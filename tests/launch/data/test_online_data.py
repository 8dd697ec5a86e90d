"""Training on data that are packed while it runs."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from launch.data.micro_batches import LoaderBatches, build_task_encoder
from launch.data.online_data import read_data
from launch.loop.parallel import initialize_parallel
from launch.loop.plan import plan_training
from launch.loop.setup import build_trainer
from offline_packing.errors import StageError
from task_encoders.settings import BMR, PACKED, VQA
from tests.helpers.legacy_packs import CRUDE_YAML
from tests.helpers.packed_runs import WHOLE_VOCABULARY, losses, make_config, make_trainer
from tests.helpers.unpacked_folders import crude_folder, folder_of

NUM_SAMPLES = 40
ONLINE: dict[str, Any] = {
    "seq_length": 512,
    "buffer": 16,
    "model": {"max_pixels": 28 * 28 * 64},
}


@pytest.fixture(autouse=True)
def _unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PACKED, VQA, BMR):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crude_folder(tmp_path_factory.mktemp("crude") / "crude", NUM_SAMPLES)


def test_the_steps_of_an_epoch_are_estimated(folder: Path, tmp_path: Path) -> None:
    config = make_config(
        folder,
        tmp_path,
        data={"online": ONLINE, "repeat": False},
        train={"iterations": None},
    )
    data = read_data(config.data)
    batches = LoaderBatches(
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


def test_a_run_trains_and_resumes(folder: Path, tmp_path: Path) -> None:
    def train(output: str, iterations: int) -> list[str]:
        config = make_config(
            folder,
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


def test_the_seed_of_a_run_decides_the_packs(folder: Path, tmp_path: Path) -> None:
    packs = []
    for seed in (0, 0, 7):
        sections: dict[str, Any] = {
            "model": WHOLE_VOCABULARY,
            "data": {"online": ONLINE, "repeat": False},
            "train": {"seed": seed},
        }
        trainer, _ = build_trainer(make_config(folder, tmp_path, **sections), initialize_parallel())
        packs.append([row.sub_sample_keys for row in iter(trainer.stages[0].train.next, None)])
    assert packs[0] == packs[1]
    assert sorted(itertools.chain(*packs[0])) == sorted(itertools.chain(*packs[2]))
    assert list(itertools.chain(*packs[0])) != list(itertools.chain(*packs[2]))


def test_what_online_data_have_not_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.online has packs while training only: set"):
        make_config(folder, tmp_path, data={"online": ONLINE, "order": "balanced"})
    with pytest.raises(ValueError, match=r"validation\.every=0"):
        make_config(folder, tmp_path, data={"online": ONLINE}, validation={"every": 2})
    own = {"online": ONLINE, "task_encoder": "task_encoders:PackedTaskEncoder"}
    config = make_config(folder, tmp_path, data=own).data
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
