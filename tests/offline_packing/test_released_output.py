"""Outputs of released versions are read by every later one; tests/data holds one of each."""

import re
import shutil
from pathlib import Path

import pytest
from megatron.energon import WorkerConfig, get_loader

from offline_packing.config.packing import parse_config
from offline_packing.engines.local import LocalEngine
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_dataset import get_packed_train_dataset
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings

DATA = Path(__file__).parents[1] / "data"
VERSIONS = sorted(path.name for path in DATA.glob("output_*"))


def run_of(folder: Path) -> Run:
    """The run that wrote an output: six pairs of a picture and a question, 128 tokens a pack."""
    content = {
        "source": {"format": "pairs", "path": "data", "task": "vqa"},
        "pack": {"seq_length": 128},
        "output": {"path": str(folder), "split": {"train": 0.7, "val": 0.3}},
        "engine": {"workers": 0},
    }
    return Run(parse_config(content), LocalEngine(0), frozenset({"modification_time"}))


@pytest.mark.parametrize("version", VERSIONS)
def test_an_output_is_whole_and_trains(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DATA / version, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "packed"
    verified = verify(run_of(folder), deep=True)
    assert verified.ok, verified
    settings = PackingSettings(packed=True, vqa=True)
    encoder = PackedTaskEncoder(seq_length=128, settings=settings)
    here = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_packed_train_dataset(folder, encoder, worker_config=here, repeat=False)
    trained = [key for batch in get_loader(dataset) for key in batch.sub_sample_keys]
    packs = PackedFolder(folder, encoder)
    rows = [packs.row(number) for number in range(len(packs))]
    assert [key for row in rows for key in row.sub_sample_keys] == trained
    assert len(trained) == len(set(trained)) > 3
    assert (rows[0].row.loss_weights > 0).any()


def test_there_is_one_of_every_release() -> None:
    changelog = (DATA.parents[1] / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[\d.]*)\]", changelog, re.MULTILINE)
    assert released
    assert {f"output_{version.replace('.', '_')}" for version in released} == set(VERSIONS)
