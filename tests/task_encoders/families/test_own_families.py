"""A model family of one's own is one class, and its name in FAMILIES."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from megatron.energon import WorkerConfig, get_loader

from offline_packing.verify.verify import verify
from task_encoders.families import FAMILIES
from task_encoders.families.qwen2_vl import QWEN2_VL, Qwen2VLEncoder, Qwen2VLOptions
from task_encoders.loading.packed_dataset import get_packed_train_dataset
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers.datasets import make_run, mixed_pairs, pack_all


class PlainEncoder(Qwen2VLEncoder):
    """Qwen2-VL whose positions count tokens, and whose pixels are not normalised."""

    LENGTHS_OF = "plain_vl"
    POSITION_ROWS = 1
    MEAN = (0.0, 0.0, 0.0)
    STD = (1.0, 1.0, 1.0)


class PlainOptions(Qwen2VLOptions):
    """With smaller images."""

    max_pixels: int = 28 * 28 * 16


PLAIN_VL = dataclasses.replace(QWEN2_VL, name="plain_vl", Options=PlainOptions, build=PlainEncoder)


def batches_of(folder: Path, family: str, **limits: int) -> list[Any]:
    encoder = PackedTaskEncoder(
        seq_length=512,
        family=family,
        settings=PackingSettings(packed=True, bmr=True),
        **limits,
    )
    here = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return list(
        get_loader(get_packed_train_dataset(folder, encoder, worker_config=here, repeat=False))
    )


def test_a_family_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, PLAIN_VL.name, PLAIN_VL)
    source = {"format": "pairs", "path": str(mixed_pairs(tmp_path / "data")), "task": "bmr"}
    run = make_run(source, tmp_path / "out", model={"family": "plain_vl", "max_pixels": None})
    manifest = pack_all(run)
    assert manifest.config["model"]["max_pixels"] == 28 * 28 * 16
    assert verify(run, deep=True).ok
    batches = batches_of(tmp_path / "out", "plain_vl")
    keys = [key for batch in batches for key in batch.sub_sample_keys]
    assert len(keys) == len(set(keys)) == manifest.counts.packed == 30
    for batch in batches:
        assert batch.position_ids.shape == (1, 1, batch.tokens.shape[1])
        assert batch.imgs.min() >= 0
        assert batch.imgs.max() <= 1
    assert any(batch.imgs.max() > 0.5 for batch in batches)
    with pytest.raises(ValueError, match="plain_vl"):
        batches_of(tmp_path / "out", "qwen2_vl", max_pixels=28 * 28 * 16)
