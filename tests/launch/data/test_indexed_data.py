"""Training on packs as token ids, by the names that NeVA gives them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from launch.config import DataConfig
from launch.data.open_packs import open_as_measured
from task_encoders.settings import PackingSettingsError
from tests.helpers.datasets import make_run, mixed_pairs, pack_all
from tests.helpers.packed_runs import (
    SEQ_LENGTH,
    losses,
    make_config,
    make_trainer,
)

LAYOUTS = ("energon", "indexed")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same packs in both layouts."""
    root = tmp_path_factory.mktemp("indexed")
    source = {"format": "pairs", "path": str(mixed_pairs(root / "source", 60)), "task": "bmr"}
    output = {"packs_per_shard": 8, "split": {"train": 0.8, "val": 0.2}}
    for layout in LAYOUTS:
        named = {**output, "layout": layout}
        pack_all(make_run(source, root / layout, pack={"seq_length": SEQ_LENGTH}, output=named))
    return {layout: root / layout for layout in LAYOUTS}


pytestmark = pytest.mark.usefixtures("bmr_environment")


def by_prefix_in(folder: Path, **other: Any) -> dict[str, Any]:
    return {"data_prefix": str(folder / "packed_seq_dataset"), **other}




def test_a_prefix_is_its_folder(folders: dict[str, Path]) -> None:
    by_folder = DataConfig(path=str(folders["indexed"]))
    by_prefix = DataConfig.model_validate({"path": "demo", **by_prefix_in(folders["indexed"])})
    assert by_folder == by_prefix
    with pytest.raises(ValidationError, match="online packs data that are not packed"):
        DataConfig.model_validate({"path": str(folders["indexed"]), "online": {"seq_length": 512}})


def test_variables_that_contradict_the_packs_are_refused_when_they_are_opened(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a model is read."""
    for variable in ("OFFLINE_PACKING_BMR", "OFFLINE_PACKED_DATA"):
        monkeypatch.delenv(variable)
        with pytest.raises(PackingSettingsError, match="set OFFLINE_PACKED_DATA=1 OFFLINE_PACKING"):
            open_as_measured(folders["indexed"] / "packed_seq_dataset", "PackedTrainer")


def test_a_folder_and_a_prefix_are_the_same_packs(folders: dict[str, Path]) -> None:
    rows = []
    for path in (folders["indexed"], folders["indexed"] / "packed_seq_dataset"):
        packs, encoder = open_as_measured(path, "PackedTrainer")
        assert encoder.seq_length == SEQ_LENGTH
        rows.append(packs.batch([0, 1]))
    assert rows[0].__key__ == rows[1].__key__
    assert torch.equal(rows[0].tokens, rows[1].tokens)
