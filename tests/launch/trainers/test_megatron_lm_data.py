"""Dataloaders for Megatron-LM: who reads what, and exact states."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config import DataConfig
from launch.data.micro_batches import build_task_encoder
from launch.data.packed_data import read_packed_data
from launch.loop.parallel import initialize_parallel
from launch.trainers.megatron_lm import build_dataloaders
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers.legacy_packs import text_folder
from tests.helpers.rank_processes import run_ranks

NUM_PACKS = 8


def arguments(folder: Path, **changes: Any) -> Namespace:
    given = {"data_path": [str(folder)], "micro_batch_size": 1, "num_workers": 0, "eval_iters": 0}
    return Namespace(**(given | changes))


def task_encoder() -> PackedTaskEncoder:
    settings = PackingSettings(packed=True, bmr=True)
    return PackedTaskEncoder(seq_length=64, settings=settings)


def keys_read(folder: Path, tensor_parallel: int, count: int) -> list[str] | None:
    """Keys of the first rows of this rank; None if it does not read."""
    initialize_parallel(tensor_parallel)
    train, validation, test = build_dataloaders(arguments(folder), task_encoder())
    assert validation is test is None
    return None if train is None else [key for _ in range(count) for key in next(train).__key__]


def test_ranks_read_in_the_order_written(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "packs", NUM_PACKS)
    (alone,) = run_ranks(1, tmp_path / "1", keys_read, folder, 1, NUM_PACKS)
    assert alone == sorted(alone)
    assert len(set(alone)) == NUM_PACKS
    for ranks in (2, 4):
        share = NUM_PACKS // ranks
        read = run_ranks(ranks, tmp_path / str(ranks), keys_read, folder, 1, share)
        assert read == [alone[rank * share : (rank + 1) * share] for rank in range(ranks)]
    assert run_ranks(2, tmp_path / "tp", keys_read, folder, 2, NUM_PACKS) == [alone, None]


def test_a_saved_state_gives_the_rest(tmp_path: Path) -> None:
    """As Megatron-LM saves and reads it, for every step of an epoch and a half."""
    folder = text_folder(tmp_path / "packs", NUM_PACKS)
    initialize_parallel()
    train, _, _ = build_dataloaders(arguments(folder, num_workers=1), task_encoder())
    assert train is not None
    keys = []
    for step in range(12):
        keys += next(train).__key__
        torch.save({"dataloader_state_dict": train.save_state()}, tmp_path / f"{step}.pt")
    for step in (0, 3, 7, 9):
        restored, _, _ = build_dataloaders(
            arguments(folder, num_workers=1), task_encoder(), tmp_path / f"{step}.pt"
        )
        assert restored is not None
        assert next(restored).__key__ + next(restored).__key__ == keys[step + 1 : step + 3]


class OwnTaskEncoder(PackedTaskEncoder):
    """Somebody's."""


def test_validation_and_an_encoder_of_ones_own(
    captions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    initialize_parallel()
    config = DataConfig(path=str(captions), task_encoder=f"{__name__}:OwnTaskEncoder")
    encoder = build_task_encoder(config, read_packed_data(captions))
    assert isinstance(encoder, OwnTaskEncoder)
    _, validation, _ = build_dataloaders(arguments(captions, eval_iters=1), encoder)
    assert validation is not None
    assert next(validation[0]).num_tokens > 0


def test_an_encoder_that_is_not_there(captions: Path) -> None:
    config = DataConfig(path=str(captions), task_encoder="json:Nothing")
    with pytest.raises(ValueError, match=r"json:Nothing.*name a 'module:Class'"):
        build_task_encoder(config, read_packed_data(captions))
