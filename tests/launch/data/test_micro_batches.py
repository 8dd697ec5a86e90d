"""Micro batches of a rank, and their state at every step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config import DataConfig
from launch.data.micro_batches import EnergonMicroBatches
from launch.loop.parallel import initialize_parallel
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers.legacy_packs import text_folder
from tests.helpers.loader_states import check_states

NUM_PACKS = 7
OTHER_WORKERS = [(1, True), (2, False), (4, False)]


@pytest.mark.parametrize(
    ("num_workers", "repeat"),
    [
        *[(0, False), (0, True), (2, True)],
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHER_WORKERS),
    ],
)
def test_a_state_of_any_step_gives_the_rest(num_workers: int, repeat: bool, tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "packs", NUM_PACKS)
    encoder = PackedTaskEncoder(seq_length=64, settings=PackingSettings(packed=True, bmr=True))
    config = DataConfig(path=str(folder), num_workers=num_workers, repeat=repeat)
    check_states(config, encoder, NUM_PACKS, tmp_path)


#: Tokens of a pack of `text_folder`.
PACK = 25


@pytest.mark.parametrize(
    ("num_workers", "repeat"),
    [(0, False), (0, True), pytest.param(2, False, marks=pytest.mark.exhaustive), (2, True)],
)
def test_dynamic_rows_have_a_state_at_every_step(
    num_workers: int, repeat: bool, tmp_path: Path
) -> None:
    """A row takes as many packs as fit; those that wait are in the state by their place."""
    folder = text_folder(tmp_path / "packs", NUM_PACKS)
    encoder = PackedTaskEncoder(seq_length=64, settings=PackingSettings(packed=True, bmr=True))
    options = {"dyn_bsz": True, "dyn_bsz_buffer_size": 5, "pad_to_length": True}
    config = DataConfig(path=str(folder), num_workers=num_workers, repeat=repeat, **options)
    device = initialize_parallel()

    def rows(state: Any, count: int) -> tuple[list[list[str]], list[Any]]:
        """Keys of rows, and the state after each."""
        batches = EnergonMicroBatches(config, encoder, device)
        if state is not None:
            batches.restore(state)
        found, states = [], []
        while len(found) < count and (row := batches.next()) is not None:
            assert row.tokens.shape == row.labels.shape == (1, 64)
            found.append(row.__key__)
            torch.save(batches.state(), tmp_path / "state.pt")
            states.append(torch.load(tmp_path / "state.pt", weights_only=True))
        batches.close()
        return found, states

    expected, states = rows(None, 8)
    assert [len(keys) for keys in expected[:3]] == [2, 2, 2]
    if repeat:
        assert len(expected) == 8
    else:
        assert sorted(key for keys in expected for key in keys) == sorted(
            f"{i:02d}" for i in range(NUM_PACKS)
        )
    for step, state in enumerate(states, start=1):
        assert rows(state, len(expected) - step)[0] == expected[step:], step


def test_rows_are_padded_after_their_packs_are_merged(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "packs", 3)
    encoder = PackedTaskEncoder(seq_length=40, settings=PackingSettings(packed=True, bmr=True))
    options = {"micro_batch_size": 2, "pad_to_length": True, "repeat": False}
    config = DataConfig(path=str(folder), num_workers=0, **options)
    batches = EnergonMicroBatches(config, encoder, initialize_parallel())
    first, last = batches.next(), batches.next()
    assert first is not None
    assert last is not None
    assert first.cu_lengths.tolist() == [[0, PACK, 2 * PACK, 80]]
    assert last.cu_lengths.tolist() == [[0, PACK, 80]]
    assert first.num_tokens == 2 * PACK
    assert last.max_lengths.tolist() == [80 - PACK]
