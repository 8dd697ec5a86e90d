"""Training on packs as token ids, by the names that NeVA gives them."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from launch.config import DataConfig
from launch.data.open_packs import open_as_measured
from task_encoders.settings import PackingSettingsError
from tests.world import World

pytestmark = pytest.mark.usefixtures("bmr_environment")


@pytest.fixture
def folder(world: World) -> Path:
    return world.packed("bmr", output={"layout": "indexed"})


def test_a_prefix_is_its_folder(folder: Path) -> None:
    prefix = str(folder / "packed_seq_dataset")
    assert DataConfig(path=str(folder)) == DataConfig(path="demo", data_prefix=prefix)
    with pytest.raises(ValidationError, match="online packs data that are not packed"):
        DataConfig.model_validate({"path": str(folder), "online": {"seq_length": 512}})
    with pytest.raises(ValidationError, match="order=balanced: packs as token ids"):
        DataConfig(path="packs", data_prefix=prefix, order="balanced")
    rows = []
    for path in (folder, Path(prefix)):
        packs, encoder = open_as_measured(path, "PackedTrainer")
        assert encoder.seq_length == 512
        rows.append(packs.batch([0, 1]))
    assert rows[0].__key__ == rows[1].__key__
    assert torch.equal(rows[0].tokens, rows[1].tokens)


def test_variables_that_contradict_the_packs_are_refused_when_they_are_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a model is read."""
    for variable in ("OFFLINE_PACKING_BMR", "OFFLINE_PACKED_DATA"):
        monkeypatch.delenv(variable)
        with pytest.raises(PackingSettingsError, match="set OFFLINE_PACKED_DATA=1 OFFLINE_PACKING"):
            open_as_measured(folder / "packed_seq_dataset", "PackedTrainer")
