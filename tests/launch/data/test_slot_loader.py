"""Runs that packs in slots cannot give are refused before the first step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from launch import train_transformers
from launch.config import DataConfig
from launch.data.micro_batches import build_loader, build_task_encoder
from launch.data.packed_data import read_packed_data
from launch.data.slots import check_slots
from launch.loop.parallel import ParallelError, initialize_parallel
from launch.model.context_parallel import part_of_rank
from offline_packing.errors import StageError
from offline_packing.storage.files import to_json
from offline_packing.upkeep.blend import blend as blend_outputs
from task_encoders import to_packed_seq_params
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.slots import SlotRows
from task_encoders.samples import SampleError
from tests.helpers.packed_runs import make_config, slots_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slots_folder(tmp_path_factory.mktemp("slots"), 4)


def test_other_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ParallelError, match=r"slots of packs for 4 ranks does not divide the 1 pr"):
        initialize_parallel(slot_ranks=4)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"micro_batch_size": 2}}, "data.micro_batch_size=2: packs .* set 1"),
        ({"data": {"pad_to_length": True}}, "data.pad_to_length=True: "),
        ({"data": {"order": "balanced"}}, "data.order=balanced: packs .* set written"),
        ({"parallel": {"context": 2}}, "parallel.context=2: packs .* set 1"),
    ],
)
def test_what_slots_cannot_give_is_refused(
    sections: dict[str, dict[str, Any]], message: str, folder: Path, tmp_path: Path
) -> None:
    config = make_config(folder, tmp_path, **sections)
    with pytest.raises(StageError, match=message):
        check_slots(config, read_packed_data(folder))


def test_a_pack_without_a_usable_sample_becomes_padding_on_all_its_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    config = DataConfig(path=str(folder), num_workers=0, repeat=False)
    encoder = build_task_encoder(config, read_packed_data(folder))
    lost = int(np.flatnonzero(SlotRows(PackedFolder(folder, encoder)).slots.cp_sizes == 4)[0])
    encode = PackedFolder.row

    def row(self: PackedFolder, number: int) -> Any:
        if number == lost:
            raise SampleError("bad_image", "of this test")
        return encode(self, number)

    monkeypatch.setattr(PackedFolder, "row", row)
    key = PackedFolder(folder)[lost].key
    found = []
    for rank in range(4):
        shares = build_loader(config, encoder, rank=rank, num_ranks=4)
        found += [share for share in shares if share.row and share.row.__key__ == [key]]
    (share,) = found
    assert share.num_ranks == share.row.local_cp_size == 4
    assert share.row.num_tokens == 0
    assert share.row.dropped == [f"{key}: bad_image: of this test"]
    assert part_of_rank(to_packed_seq_params(share.row), 4, 0).own.tolist() == [0, 7]


def test_blends_of_slots_are_refused(folder: Path, tmp_path: Path) -> None:
    blend = tmp_path / "blend.yaml"
    datasets = {"blend": [{"path": str(folder), "weight": 1}]}
    metadataset = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    blend.write_bytes(to_json({**metadataset, "splits": {"train": datasets}}))
    with pytest.raises(StageError, match=r"blend.yaml blends packs .* pack all sources in one out"):
        read_packed_data(blend)
    with pytest.raises(StageError, match=r"slots that a blend would tear apart; give one conf"):
        blend_outputs([folder])


def test_transformers_models_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_transformers, "start_logging", lambda: None)
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{path: {folder}}}\nbatch: {{global_batch_packs: 8}}")
    command = [str(config), f"output.path={tmp_path / 'out'}"]
    result = CliRunner().invoke(train_transformers.main, command)
    assert result.exit_code == 1
    assert "only launch.train trains packs on several ranks; train them with" in result.output
