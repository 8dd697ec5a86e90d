"""Samples to one row: the published examples, media, padding, what is refused; and the loss of rows
in each mode of PyTorch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from offline_packing.online.collate import count_tokens, padding_free_collator
from offline_packing.online.datasets import (
    ConstantLengthDataset,
    DynamicBatches,
    PackedIterableDataset,
)
from task_encoders.samples import IGNORE_INDEX, SampleError
from tests.helpers.online_samples import Indexed, lettered
from tests.helpers.tiny_checkpoints import row_samples, transformers_model, unpacked_inputs


def test_the_documented_row() -> None:
    row = padding_free_collator(lettered(4, 2, 3, 1))
    assert row["input_ids"].tolist() == [list(range(1, 11))]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 0]]
    assert row["labels"].tolist() == [
        [IGNORE_INDEX, 2, 3, 4, IGNORE_INDEX, 6, IGNORE_INDEX, 8, 9, IGNORE_INDEX]
    ]
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == [0, 4, 6, 9, 10]
    assert row["cu_seq_lens_q"].dtype == torch.int32
    assert row["max_length_q"] == row["max_length_k"] == 4
    assert row["use_cache"] is False
    assert row.keys() >= {"input_ids", "labels"}
    assert "length" not in row
    assert "attention_mask" not in row


@pytest.mark.parametrize(
    ("lengths", "pad_to_length", "position_ids", "cu_seqlens"),
    [
        ((4, 2), 8, [0, 1, 2, 3, 0, 1, 0, 1], [0, 4, 6, 8]),
        ((3, 2, 2), 10, [0, 1, 2, 0, 1, 0, 1, 0, 1, 2], [0, 3, 5, 7, 10]),
        # The document prints positions that begin at 1 here, against its own boundaries.
        ((4, 1), 8, [0, 1, 2, 3, 0, 0, 1, 2], [0, 4, 5, 8]),
        ((3, 2), 8, [0, 1, 2, 0, 1, 0, 1, 2], [0, 3, 5, 8]),
        ((4, 4), 8, [0, 1, 2, 3, 0, 1, 2, 3], [0, 4, 8]),
    ],
)
@pytest.mark.parametrize("pad_token_id", [0, 151_643])
def test_padding_is_one_more_segment(
    lengths, pad_to_length, position_ids, cu_seqlens, pad_token_id
) -> None:
    samples = lettered(*lengths)
    row = padding_free_collator(samples, pad_to_length=pad_to_length, pad_token_id=pad_token_id)
    used = sum(lengths)
    padding = pad_to_length - used
    assert row["input_ids"].tolist() == [[*range(1, used + 1), *[pad_token_id] * padding]]
    assert row["position_ids"].tolist() == [position_ids]
    assert row["cu_seq_lens_q"].tolist() == cu_seqlens
    assert row["labels"][0, used:].tolist() == [IGNORE_INDEX] * padding
    assert row["max_length_q"] == max(*lengths, padding)


def test_positions_of_media_restart() -> None:
    """Rows of M-RoPE stay those of each sample; text counts in all three."""
    first, second, third = lettered(3, 2, 4)
    first["position_ids"] = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 2]])
    third["position_ids"] = torch.tensor([[[9, 9, 9, 9]], *[[[0, 1, 2, 2]]] * 3])  # (4, 1, n)
    first["pixel_values"], first["image_grid_thw"] = torch.ones(4, 6), torch.ones(1, 3)
    third["pixel_values"], third["image_grid_thw"] = torch.ones(8, 6), torch.ones(2, 3)
    third["mm_token_type_ids"] = [0, 1, 1, 0]
    row = padding_free_collator([first, second, third], pad_to_length=11)
    assert row["position_ids"].tolist() == [
        [[0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1]],
        [[0, 1, 1, 0, 1, 0, 1, 2, 2, 0, 1]],
        [[0, 1, 1, 0, 1, 0, 1, 2, 2, 0, 1]],
        [[0, 1, 2, 0, 1, 0, 1, 2, 2, 0, 1]],
    ]
    assert row["pixel_values"].shape == (12, 6)
    assert row["image_grid_thw"].shape == (3, 3)
    assert row["mm_token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0]]


def test_lists_arrays_and_rows_of_a_processor_are_taken() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "labels": (1, 2, 3), "pixel_values": None},
        {"input_ids": np.array([4, 5]), "labels": [IGNORE_INDEX, 5], "length": 2},
        {"input_ids": torch.tensor([[6]]), "labels": [6], "attention_mask": torch.ones(1, 1)},
    ]
    row = padding_free_collator(samples)
    assert row["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]
    assert row["labels"].tolist() == [[IGNORE_INDEX, 2, 3, IGNORE_INDEX, 5, IGNORE_INDEX]]
    assert row.keys().isdisjoint({"pixel_values", "attention_mask", "length"})


def test_media_in_lists_are_in_the_row() -> None:
    """As Hugging Face's datasets have them; text has empty ones."""
    picture = {"image_grid_thw": [[1, 2, 2]], "position_ids": [[0, 1], [0, 0], [0, 1]]}
    samples = [
        {"input_ids": [1, 2], "pixel_values": [[0.5, 1.0]] * 4, **picture},
        {"input_ids": [3], "pixel_values": [], "image_grid_thw": []},
        {"input_ids": [4, 5], "pixel_values": [torch.zeros(2)] * 4, **picture},
    ]
    row = padding_free_collator(samples)
    assert row["pixel_values"].tolist() == [[0.5, 1.0]] * 4 + [[0.0, 0.0]] * 4
    assert row["pixel_values"].dtype == torch.float32
    assert row["image_grid_thw"].tolist() == [[1, 2, 2]] * 2
    assert row["image_grid_thw"].dtype == torch.int64
    counted = [0, 1, 0, 0, 1]
    assert row["position_ids"][:, 0].tolist() == [counted, counted, [0] * 5, counted]
    assert "pixel_values" not in padding_free_collator(samples[1:2])


def test_images_in_lists_stay_one_list() -> None:
    """Images of any sizes, as nanoVLM's model takes them."""
    images = [torch.full((tiles, 3, 4, 4), tiles) for tiles in (1, 2, 5)]
    samples = [
        {"input_ids": [1], "images": images[:2]},
        {"input_ids": [2], "images": []},
        {"input_ids": [3], "images": images[2:]},
    ]
    row = padding_free_collator(samples)
    assert all(one is image for one, image in zip(row["images"], images, strict=True))
    (packed,) = ConstantLengthDataset(samples, seq_length=3, delta=0, yields="rows")
    assert sorted(len(image) for image in packed["images"]) == [1, 2, 5]
    (batch,) = DynamicBatches(samples, max_seq_len=3)
    assert sorted(len(image) for image in batch["images"]) == [1, 2, 5]
    assert padding_free_collator(samples[1:2])["images"] == []


FIRST = {"input_ids": [1], "pixel_values": torch.ones(1, 2), "images": [torch.ones(1, 2)]}
LACKS_IDS = r"input_ids of a sample with .* is (missing|empty)"
#: Fields of a sample after FIRST, and what is said of them.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"key": "a"}, r"field 'key' of a sample, str 'a', is not an array"),
    ({"pixel_values": [[1.0], [1.0, 2.0]]}, "field .pixel_values. of a sample, list .*"),
    ({"meta": {"a": 1}}, "field 'meta' of a sample, dict {'a': 1}, is not an array"),
    ({"pixel_values": [torch.ones(1), torch.ones(2)]}, "field 'pixel_values' .* is not an array"),
    ({"pixel_values": torch.ones(2, 3)}, r"'pixel_values' .* has \[\(1, 2\), \(2, 3\)\]"),
    ({"images": torch.ones(1, 2)}, r"field 'images' .* has \['a list', \(1, 2\)\]"),
    ({"input_ids": torch.ones(2, 5)}, r"input_ids of a sample of 5 tokens has shape \(2, 5\)"),
    ({"labels": [1, 2, 3]}, r"labels of a sample of 2 tokens has shape \(3,\); give one value"),
    ({"position_ids": [[0, 1], [0, 1]]}, r"position_ids of a sample of 2 .* shape \(2, 2\)"),
    ({"labels": [1, 2]}, "1 of 2 samples of a row have no labels; give labels to"),
    ({"loss_scale": torch.ones(2)}, "loss_scale has not one value per token"),
    *(({"input_ids": ids}, LACKS_IDS) for ids in (None, [])),
]


@pytest.mark.parametrize(("field", "message"), REFUSED)
def test_what_cannot_be_in_a_row_is_named(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        padding_free_collator([FIRST, {"input_ids": [1, 2], **field}])


def test_rows_that_are_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        padding_free_collator([])
    with pytest.raises(ValueError, match="a row of 5 tokens does not fit pad_to_length 4"):
        padding_free_collator(lettered(3, 2), pad_to_length=4)
    with pytest.raises(ValueError, match=LACKS_IDS):
        padding_free_collator([*lettered(3), {"labels": [1]}])


def test_lengths_of_samples_that_are_not_one_row_are_refused() -> None:
    assert count_tokens({"input_ids": torch.ones(1, 5), "length": np.int64(5)}) == 5
    for sample, message in (
        ({"input_ids": np.ones((2, 5))}, r"its input_ids have shape \(2, 5\), not \(n,\)"),
        ({"length": 5.5}, "its length is 5.5, not a whole number"),
        ({"length": "5"}, "its length is '5', not a whole number"),
        ({"length": True}, "its length is True, not a whole number"),
        ({"length": 4, "input_ids": [1, 2]}, "its length is 4, and it has 2 input_ids"),
    ):
        with pytest.raises(SampleError, match=message):
            count_tokens(sample)


def test_samples_without_labels_train_all_but_their_first_token() -> None:
    samples = [{**one, "labels": None} for one in lettered(3, 2)]
    labels = padding_free_collator(samples)["labels"]
    assert labels.tolist() == [[IGNORE_INDEX, 2, 3, IGNORE_INDEX, 5]]


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
