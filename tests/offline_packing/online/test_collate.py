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
from task_encoders.model_inputs import pixel_kwargs, to_transformers_kwargs
from task_encoders.samples import IGNORE_INDEX, SampleError
from tests.helpers.online_samples import Indexed, lettered
from tests.helpers.tiny_checkpoints import (
    gradients_of,
    packed_batch,
    row_samples,
    transformers_model,
    unpacked_inputs,
)
from tests.helpers.tiny_families import encoded_samples, encoder_of
from tests.world import World


@pytest.mark.parametrize(
    ("lengths", "pad_to_length", "position_ids", "cu_seqlens"),
    [
        ((4, 2, 3, 1), None, [0, 1, 2, 3, 0, 1, 0, 1, 2, 0], [0, 4, 6, 9, 10]),
        ((3, 2, 2), 10, [0, 1, 2, 0, 1, 0, 1, 0, 1, 2], [0, 3, 5, 7, 10]),
        # The document prints positions that begin at 1 here, against its own boundaries.
        ((4, 1), 8, [0, 1, 2, 3, 0, 0, 1, 2], [0, 4, 5, 8]),
        ((4, 4), 8, [0, 1, 2, 3, 0, 1, 2, 3], [0, 4, 8]),
    ],
)
def test_the_documented_rows(lengths, pad_to_length, position_ids, cu_seqlens) -> None:
    """Padding is one more segment."""
    row = padding_free_collator(lettered(*lengths), pad_to_length=pad_to_length, pad_token_id=99)
    ids = range(1, sum(lengths) + 1)
    padding = (pad_to_length or len(ids)) - len(ids)
    assert row["input_ids"].tolist() == [[*ids, *[99] * padding]]
    firsts = {sum(lengths[:i]) + 1 for i in range(len(lengths))}
    labels = [IGNORE_INDEX if number in firsts else number for number in ids]
    assert row["labels"].tolist() == [[*labels, *[IGNORE_INDEX] * padding]]
    assert row["position_ids"].tolist() == [position_ids]
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == cu_seqlens
    assert row["cu_seq_lens_q"].dtype == torch.int32
    assert row["max_length_q"] == row["max_length_k"] == max(*lengths, padding)
    assert row["use_cache"] is False
    assert row.keys().isdisjoint({"length", "attention_mask"})


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
    assert row["input_ids"][0, 9:].tolist() == [0, 0]
    assert row["pixel_values"].shape == (12, 6)
    assert row["image_grid_thw"].shape == (3, 3)
    assert row["mm_token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0]]


def test_lists_arrays_and_rows_of_a_processor_are_taken() -> None:
    """Without labels all tokens but the first of a sample are trained."""
    ids = ([1, 2, 3], np.array([4, 5]), torch.tensor([[6]]))
    labels = ((1, 2, 3), [IGNORE_INDEX, 5], [6])
    more = ({"pixel_values": None}, {"length": 2}, {"attention_mask": torch.ones(1, 1)})
    for given in (labels, (None,) * 3):
        row = padding_free_collator(
            [
                {"input_ids": own, "labels": label, **rest}
                for own, label, rest in zip(ids, given, more, strict=True)
            ]
        )
        assert row["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]
        assert row["labels"].tolist() == [[IGNORE_INDEX, 2, 3, IGNORE_INDEX, 5, IGNORE_INDEX]]
        assert row.keys().isdisjoint({"pixel_values", "attention_mask", "length"})


@pytest.mark.parametrize("family", ["qwen2_vl", "llava_1_5", "mistral3", "gemma4", "internvl3"])
def test_encoded_samples_have_the_media_that_their_model_takes(family: str, world: World) -> None:
    samples = encoded_samples(family, encoder_of(world.tokenizer(family)))
    row, expected = padding_free_collator(samples), to_transformers_kwargs(packed_batch(samples))
    assert row.keys() == expected.keys() > {"pixel_values"}
    for name in pixel_kwargs(packed_batch(samples)):
        assert torch.equal(row[name], expected[name]), name


def test_media_in_lists_are_in_the_row() -> None:
    """As Hugging Face's datasets have them; text has empty ones. Images of any sizes stay one list,
    as nanoVLM's model takes them."""
    other = {"image_grid_thw": [[1, 2, 2]], "position_ids": [[0, 1], [0, 0], [0, 1]]}
    images = [torch.full((tiles, 3, 4, 4), tiles) for tiles in (1, 2, 5)]
    samples = [
        {"input_ids": [1, 2], "pixel_values": [[0.5, 1.0]] * 4, "images": images[:2], **other},
        {"input_ids": [3], "pixel_values": [], "image_grid_thw": [], "images": []},
        {"input_ids": [4, 5], "pixel_values": [torch.zeros(2)] * 4, "images": images[2:], **other},
    ]
    row = padding_free_collator(samples)
    assert row["pixel_values"].tolist() == [[0.5, 1.0]] * 4 + [[0.0, 0.0]] * 4
    assert row["pixel_values"].dtype == torch.float32
    assert row["image_grid_thw"].tolist() == [[1, 2, 2]] * 2
    assert row["image_grid_thw"].dtype == torch.int64
    counted = [0, 1, 0, 0, 1]
    assert row["position_ids"][:, 0].tolist() == [counted, counted, [0] * 5, counted]
    assert all(one is image for one, image in zip(row["images"], images, strict=True))
    text = padding_free_collator(samples[1:2])
    assert "pixel_values" not in text
    assert text["images"] == []


FIRST = {"input_ids": [1], "pixel_values": torch.ones(1, 2), "images": [torch.ones(1, 2)]}
LACKS_IDS = r"input_ids of a sample with .* is (missing|empty)"
#: Fields of a sample after FIRST, and what is said of them.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"key": "a"}, r"field 'key' of a sample, str 'a', is not an array"),
    ({"pixel_values": [[1.0], [1.0, 2.0]]}, "field .pixel_values. of a sample, list .*"),
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: padding_free_collator([]), "at least one sample"),
        (
            lambda: padding_free_collator(lettered(3, 2), pad_to_length=4),
            "a row of 5 tokens does not fit pad_to_length 4",
        ),
        (lambda: padding_free_collator([*lettered(3), {"labels": [1]}]), LACKS_IDS),
        (lambda: count_tokens({"input_ids": np.ones((2, 5))}), r"shape \(2, 5\), not \(n,\)"),
        (lambda: count_tokens({"length": 5.5}), "its length is 5.5, not a whole number"),
        (lambda: count_tokens({"length": "5"}), "its length is '5', not a whole number"),
        (lambda: count_tokens({"length": True}), "its length is True, not a whole number"),
        (lambda: count_tokens({"length": 4, "input_ids": [1, 2]}), "4, and it has 2 input_ids"),
    ],
)
def test_what_is_no_row_is_refused(call: Callable[[], Any], message: str) -> None:
    assert count_tokens({"input_ids": torch.ones(1, 5), "length": np.int64(5)}) == 5
    with pytest.raises((ValueError, SampleError), match=message):
        call()


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers_model("qwen2_vl", tied=False)


@pytest.fixture(scope="module")
def samples(model: Any) -> list[Any]:
    """Text, one image, several, a video."""
    return [sample for name in ("mixed", "videos") for sample in row_samples(model, name)]


def as_dicts(samples: list[Any]) -> list[dict[str, Any]]:
    """The samples as a trainer's own dataset has them."""
    names = "labels position_ids pixel_values pixel_values_videos image_grid_thw video_grid_thw"
    dicts = []
    for sample in samples:
        arrays = {"input_ids": sample.tokens} | {n: getattr(sample, n) for n in names.split()}
        arrays = {name: torch.from_numpy(array) for name, array in arrays.items() if len(array)}
        dicts.append(arrays | {"length": len(sample.tokens)})
    return dicts


MODES: dict[str, Callable[[list[Any]], Any]] = {
    "samples and a collator": lambda samples: DataLoader(
        PackedIterableDataset(Indexed(as_dicts(samples)), seq_length=128, strategy="auto"),
        batch_size=2,
        collate_fn=padding_free_collator,
    ),
    "constant, padded": lambda samples: ConstantLengthDataset(
        samples, seq_length=160, delta=0, yields="rows", pad_token_id=3
    ),
    "dynamic, padded": lambda samples: DynamicBatches(
        as_dicts(samples), max_seq_len=160, pad_to_length=True, pad_token_id=3
    ),
}


def loss_and_gradients(
    model: Any, rows: list[dict[str, Any]]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss per labelled token of all rows, and its gradients."""
    counts = [int((row["labels"][:, 1:] != IGNORE_INDEX).sum()) for row in rows]
    total = 0.0
    for row, count in zip(rows, counts, strict=True):
        if count:
            loss = model(**row).loss * (count / sum(counts))
            loss.backward()
            total += loss.item()
    return total, gradients_of(model)


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
