"""Micro batches of a rank, and their state at every step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config import DataConfig
from launch.data import EnergonMicroBatches
from launch.parallel import initialize_parallel
from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers.legacy_packs import text_folder

NUM_PACKS = 7


@pytest.mark.parametrize(
    ("num_workers", "repeat"), [(0, False), (0, True), (1, True), (2, False), (2, True), (4, False)]
)
def test_a_state_of_any_step_gives_the_rest(num_workers: int, repeat: bool, tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "packs", NUM_PACKS)
    encoder = Qwen2VLTaskEncoder(seq_length=64, settings=PackingSettings(packed=True, bmr=True))
    config = DataConfig(path=str(folder), num_workers=num_workers, repeat=repeat)
    device = initialize_parallel()

    def open_batches(state: Any = None) -> EnergonMicroBatches:
        batches = EnergonMicroBatches(config, encoder, device)
        if state is not None:
            batches.restore(state)
        return batches

    def keys(batches: EnergonMicroBatches, count: int) -> list[str]:
        rows = [batches.next() for _ in range(count)]
        return [key for row in rows if row is not None for key in row.__key__]

    whole = open_batches()
    states, seen = [whole.state()], []
    for step in range(NUM_PACKS + 2):
        seen += keys(whole, 1)
        torch.save(whole.state(), tmp_path / f"{step}.pt")
        states.append(torch.load(tmp_path / f"{step}.pt", weights_only=True))
    seen += keys(whole, 3)
    whole.close()
    assert len(seen) == (NUM_PACKS + 5 if repeat else NUM_PACKS)
    assert len(set(seen)) == NUM_PACKS
    for step, state in enumerate(states):
        restored = open_batches(state)
        assert keys(restored, 3) == seen[step : step + 3], step
        restored.close()
