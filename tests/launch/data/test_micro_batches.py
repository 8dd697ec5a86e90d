"""Micro batches of a rank, and their state at every step."""

import json
from pathlib import Path

import pytest
import torch

from launch.config import DataConfig
from launch.data.micro_batches import LoaderBatches
from launch.loop.parallel import initialize_parallel
from offline_packing.errors import StageError
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers.legacy_packs import DATASET_YAML, text_folder, write_folder

NUM_PACKS = 7


@pytest.mark.parametrize("repeat", [False, True])
def test_a_state_of_any_step_gives_the_rest(repeat: bool, tmp_path: Path) -> None:
    """Across the end of an epoch, and read without running code."""
    folder = text_folder(tmp_path / "packs", NUM_PACKS)
    encoder = PackedTaskEncoder(seq_length=64, settings=PackingSettings(packed=True, bmr=True))
    config = DataConfig(path=str(folder), num_workers=0, repeat=repeat)

    def next_keys(batches: LoaderBatches) -> list[str] | None:
        row = batches.next()
        return None if row is None else row.__key__

    whole = LoaderBatches(config, encoder, initialize_parallel())
    states, seen = [], []
    for _ in range(NUM_PACKS + 3):
        torch.save(whole.state(), tmp_path / "state.pt")
        states.append(torch.load(tmp_path / "state.pt", weights_only=True))
        seen.append(next_keys(whole))
    assert (seen[NUM_PACKS:] == seen[:3]) if repeat else (seen[NUM_PACKS:] == [None] * 3)
    for step, state in enumerate(states):
        restored = LoaderBatches(config, encoder, initialize_parallel())
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
    batches = LoaderBatches(config, encoder, initialize_parallel())
    rows = [row for row in iter(batches.next, None) if row is not None]
    assert [row.num_tokens for row in rows] == [PACK, 0, PACK]
    assert [float(row.loss_mask.sum()) > 0 for row in rows] == [True, False, True]
    assert "left out, in pack 01 or before: 01: bad_record" in caplog.text
    config = DataConfig(path=str(tmp_path / "all"), num_workers=0)
    batches = LoaderBatches(config, encoder, initialize_parallel())
    with pytest.raises(StageError, match="100 consecutive rows have no usable sample: 00: "):
        list(iter(batches.next, None))


#: Tokens of a pack of `text_folder`.
PACK = 25


def test_rows_are_padded_after_their_packs_are_merged(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "packs", 3)
    encoder = PackedTaskEncoder(seq_length=40, settings=PackingSettings(packed=True, bmr=True))
    options = {"micro_batch_size": 2, "pad_to_length": True, "repeat": False}
    config = DataConfig(path=str(folder), num_workers=0, **options)
    batches = LoaderBatches(config, encoder, initialize_parallel())
    first, last = batches.next(), batches.next()
    assert first is not None
    assert last is not None
    assert first.cu_lengths.tolist() == [[0, PACK, 2 * PACK, 80]]
    assert last.cu_lengths.tolist() == [[0, PACK, 80]]
    assert first.num_tokens == 2 * PACK
    assert last.max_lengths.tolist() == [80 - PACK]
