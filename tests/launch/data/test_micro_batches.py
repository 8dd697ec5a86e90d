"""Micro batches of a rank, and their state at every step."""

from pathlib import Path

import pytest

from launch.config import DataConfig
from launch.data.micro_batches import LoaderBatches
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
