"""Losses of packs in each mode of PyTorch: the loss and gradients of the samples alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from offline_packing.online.collate import padding_free_collator
from offline_packing.online.datasets import (
    ConstantLengthDataset,
    DynamicBatches,
    PackedIterableDataset,
)
from task_encoders.packs.tokenized import IGNORE_INDEX
from tests.helpers.online_samples import Indexed
from tests.helpers.tiny_checkpoints import row_samples, transformers_model, unpacked_inputs

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers_model("qwen2_vl", tied=False)


@pytest.fixture(scope="module")
def samples(model: Any) -> list[Any]:
    """Text, one image, several, a video."""
    return [sample for name in ("mixed", "videos") for sample in row_samples(model, name)]


def as_dicts(samples: list[Any]) -> list[dict[str, Any]]:
    """The samples as a trainer's own dataset has them."""
    names = {"tokens": "input_ids", "labels": "labels", "position_ids": "position_ids"}
    names |= {"pixel_values": "pixel_values", "pixel_values_videos": "pixel_values_videos"}
    names |= {"image_grid_thw": "image_grid_thw", "video_grid_thw": "video_grid_thw"}
    dicts = []
    for sample in samples:
        arrays = {name: getattr(sample, ours) for ours, name in names.items()}
        arrays = {name: torch.from_numpy(array) for name, array in arrays.items() if len(array)}
        dicts.append(arrays | {"length": len(sample.tokens)})
    return dicts


MODES: dict[str, Callable[[list[Any]], Any]] = {
    "rows": lambda samples: PackedIterableDataset(samples, seq_length=128, yields="rows"),
    "samples and a collator": lambda samples: DataLoader(
        PackedIterableDataset(Indexed(as_dicts(samples)), seq_length=128, strategy="auto"),
        batch_size=2,
        collate_fn=padding_free_collator,
    ),
    "constant, padded": lambda samples: ConstantLengthDataset(
        samples, seq_length=160, delta=0, yields="rows", pad_token_id=3
    ),
    "dynamic": lambda samples: DynamicBatches(samples, max_seq_len=160),
    "dynamic, padded": lambda samples: DynamicBatches(
        as_dicts(samples), max_seq_len=160, pad_to_length=True, pad_token_id=3
    ),
    "fixed": lambda samples: DynamicBatches(
        samples, dyn_bsz=False, micro_batch_size=3, max_seq_len=128
    ),
}


def loss_and_gradients(model: Any, rows: Rows) -> tuple[float, dict[str, torch.Tensor]]:
    """Per labelled token of all rows."""
    counts = [int((row["labels"][:, 1:] != IGNORE_INDEX).sum()) for row in rows]
    model.zero_grad()
    total = 0.0
    for row, count in zip(rows, counts, strict=True):
        if count:
            loss = model(**row).loss * (count / sum(counts))
            loss.backward()
            total += loss.item()
    return total, {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("mode", MODES)
def test_packed_equals_unpacked(mode: str, model: Any, samples: list[Any]) -> None:
    alone = [
        {**unpacked_inputs(sample), "labels": torch.from_numpy(sample.labels)[None]}
        for sample in samples
    ]
    rows = list(MODES[mode](samples))
    assert len(rows) < len(samples) / 2
    if mode.endswith("padded"):
        assert {row["input_ids"].shape for row in rows} == {(1, 160)}
    expected, expected_gradients = loss_and_gradients(model, alone)
    loss, gradients = loss_and_gradients(model, rows)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    assert len(gradients) > 40
    for name, gradient in expected_gradients.items():
        # That of a key's bias is 0 but for rounding: softmax does not see it.
        assert (gradients[name] - gradient).norm() < 1e-4 * gradient.norm() + 1e-8, name


@torch.no_grad()
def test_without_boundaries_samples_see_each_other(model: Any, samples: list[Any]) -> None:
    """The control: a loss that would be equal for any row proves nothing."""
    (row,) = PackedIterableDataset(samples, seq_length=1000, yields="rows")
    leaking = dict(row)
    leaking["position_ids"] = row["position_ids"].clone()
    leaking["position_ids"][0] = torch.arange(row["input_ids"].shape[1])
    difference = model(**row).logits - model(**leaking).logits
    assert difference.abs().max() > 0.1
