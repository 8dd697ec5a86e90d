"""A model family of one's own is one class, and its name in FAMILIES."""

import dataclasses
from pathlib import Path

import pytest

from offline_packing.verify.verify import verify
from task_encoders.families import FAMILIES, model_options
from task_encoders.families.qwen2_vl import QWEN2_VL, Qwen2VLEncoder, Qwen2VLOptions
from tests.helpers.datasets import make_run, mixed_pairs, pack_all
from tests.helpers.energon_batches import batches_of, encoder_of


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


def test_a_family_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, PLAIN_VL.name, PLAIN_VL)
    source = {"format": "pairs", "path": str(mixed_pairs(tmp_path / "data")), "task": "bmr"}
    run = make_run(source, tmp_path / "out", model={"family": "plain_vl", "max_pixels": None})
    manifest = pack_all(run)
    assert manifest.config["model"]["max_pixels"] == 28 * 28 * 16
    assert verify(run, deep=True).ok
    batches = batches_of(tmp_path / "out", encoder_of(run))
    keys = [key for batch in batches for key in batch.sub_sample_keys]
    assert len(keys) == len(set(keys)) == manifest.counts.packed == 30
    for batch in batches:
        assert batch.position_ids.shape == (1, 1, batch.tokens.shape[1])
        assert batch.imgs.min() >= 0
        assert batch.imgs.max() <= 1
    assert any(batch.imgs.max() > 0.5 for batch in batches)
    other = {"family": "qwen2_vl", "max_pixels": 28 * 28 * 16}
    with pytest.raises(ValueError, match="plain_vl"):
        batches_of(tmp_path / "out", encoder_of(run, model=model_options(**other)))
