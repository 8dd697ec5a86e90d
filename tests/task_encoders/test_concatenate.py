"""Rows and batches: shapes, boundaries and padding as the batch contract states them."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from task_encoders import buffers
from task_encoders.concatenate import PackedRow, concatenate, merge_rows, split_row
from task_encoders.energon_samples import PackedBatch, PackedRowSample, batch_rows
from task_encoders.media.patches import Normalisation
from task_encoders.model_inputs import (
    pad_batch,
    required_pad_multiple,
    to_packed_seq_params,
    to_transformers_kwargs,
)
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX
from tests.helpers.tiny_checkpoints import packed_batch

PAD = 0
JOINED = {"cross_sample_attention": True}
#: A byte is its own value.
NORMALISATION = Normalisation(np.tile(np.arange(256, dtype=np.float32), (3, 1)), repeats=2)


def sample(key: str, length: int, images: int = 0, videos: int = 0) -> EncodedSample:
    tokens = np.arange(1, length + 1, dtype=np.int64) + 100 * len(key)
    return EncodedSample(
        key=key,
        tokens=tokens,
        loss_weights=np.ones(length, dtype=np.float32),
        position_ids=np.tile(np.arange(length), (3, 1)),
        image_pixels=np.ones((4 * images, 588), dtype=np.uint8),
        image_grid_thw=np.tile(np.array([1, 2, 2], dtype=np.int32), (images, 1)),
        video_pixels=np.full((12 * videos, 1176), len(key), dtype=np.uint8),
        video_grid_thw=np.tile(np.array([3, 2, 2], dtype=np.int32), (videos, 1)),
        normalisation=NORMALISATION,
    )


def row(*lengths: int, **options: Any) -> PackedRow:
    samples = [sample("x" * (i + 1), length) for i, length in enumerate(lengths)]
    return concatenate(samples, pad_token_id=PAD, **options)


def as_batch(packed: PackedRow) -> PackedBatch:
    keys: dict[str, Any] = {"__key__": "a", "__restore_key__": (), "sub_sample_keys": []}
    return batch_rows([PackedRowSample(**keys, row=packed, dropped=[])])


@pytest.mark.parametrize(
    ("lengths", "options", "cu_lengths", "positions"),
    [
        ((3, 2, 4), {}, [0, 3, 5, 9], [0, 1, 2, 0, 1, 0, 1, 2, 3]),
        # Worked examples of dynamic batching with padded packed inputs: tail padding is a segment.
        ((4, 2), {"pad_to_length": 8}, [0, 4, 6, 8], [0, 1, 2, 3, 0, 1, 0, 1]),
        ((3, 2, 2), {"pad_to_length": 10}, [0, 3, 5, 7, 10], [0, 1, 2, 0, 1, 0, 1, 0, 1, 2]),
        ((4, 1), {"pad_to_length": 8}, [0, 4, 5, 8], [0, 1, 2, 3, 0, 0, 1, 2]),
        # Each sub-sample is padded, or the row, where all are one segment.
        ((3, 4, 5), {"multiple": 4}, [0, 4, 8, 16], [0, 1, 2, 3, 0, 1, 2, 3, *range(8)]),
        ((3, 2), {**JOINED, "pad_to_length": 6}, [0, 5, 6], [0, 1, 2, 3, 4, 0]),
        ((3, 2), {**JOINED, "multiple": 4}, [0, 8], [*range(8)]),
    ],
)
def test_boundaries_and_positions(
    lengths: tuple[int, ...], options: Any, cu_lengths: list[int], positions: list[int]
) -> None:
    packed = row(*lengths, **options)
    real = ~packed.attn_mask
    assert packed.cu_lengths.dtype == torch.int32
    assert packed.cu_lengths.tolist() == cu_lengths
    assert packed.position_ids.tolist() == [positions] * 3
    expected = [100 * number + i for number, n in enumerate(lengths, 1) for i in range(1, n + 1)]
    assert packed.tokens[real].tolist() == expected
    assert (packed.tokens[~real] == PAD).all()
    assert (packed.labels[~real] == IGNORE_INDEX).all()
    if "cross_sample_attention" in options:
        assert real.diff().sum() <= 1  # no sample sees padding
    firsts = np.flatnonzero(packed.labels[real] == IGNORE_INDEX)
    assert firsts.tolist() == np.cumsum([0, *lengths[:-1]]).tolist()


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens does not fit pad_to_length 8"):
        row(5, 4, pad_to_length=8)
    with pytest.raises(ValueError, match="at least one"):
        concatenate([], pad_token_id=PAD)


def test_packed_seq_params_of_plain_and_padded_rows() -> None:
    plain = to_packed_seq_params(as_batch(row(3, 2, 4)))
    assert plain.qkv_format == "thd"
    assert plain.cu_seqlens_q.tolist() == [0, 3, 5, 9]
    assert plain.cu_seqlens_q_padded is None
    assert plain.max_seqlen_q == 4
    padded = to_packed_seq_params(as_batch(row(3, 6, multiple=4, pad_to_length=16)))
    assert padded.cu_seqlens_q.tolist() == [0, 3, 9, 13]  # the tail stays a segment
    assert padded.cu_seqlens_q_padded.tolist() == [0, 4, 12, 16]
    assert padded.max_seqlen_q == 8
    needs_none = to_packed_seq_params(as_batch(merge_rows([row(4, 8, multiple=4)])))
    assert needs_none.cu_seqlens_q_padded.tolist() == needs_none.cu_seqlens_q.tolist()


def test_a_merged_batch_is_padded() -> None:
    batch = packed_batch([sample("a", 3), sample("bb", 2)])
    padded = pad_batch(batch, 8, pad_token_id=7)
    assert padded.cu_lengths.tolist() == [[0, 3, 5, 8]]
    assert padded.tokens[0, 5:].tolist() == [7] * 3
    assert padded.labels[0, 5:].tolist() == [IGNORE_INDEX] * 3
    assert padded.loss_mask[0, 5:].tolist() == [0] * 3
    assert padded.attn_mask.tolist() == [[False] * 5 + [True] * 3]
    assert padded.position_ids[..., 5:].tolist() == [[[0, 1, 2]]] * 3
    kwargs = to_transformers_kwargs(padded)
    assert kwargs["cu_seq_lens_q"].tolist() == kwargs["cu_seq_lens_k"].tolist() == [0, 3, 5, 8]
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 3
    # The first row of positions restarts at boundaries.
    assert kwargs["position_ids"][:, 0, :5].tolist() == [[0, 1, 2, 0, 1]] * 4
    assert kwargs["use_cache"] is False
    assert "attention_mask" not in kwargs
    assert row(3).pixel_values.shape == (0, 1176)  # a row without pictures gives a model none
    assert "pixel_values" not in kwargs
    assert pad_batch(batch, 5, 7).cu_lengths.tolist() == [[0, 3, 5]]
    with pytest.raises(ValueError, match="a row of 5 tokens does not fit length 4"):
        pad_batch(batch, 4, 7)


@pytest.mark.parametrize(
    ("parallel", "multiple"),
    [
        ({}, 1),
        ({"context_parallel": 2}, 4),
        ({"tensor_parallel": 4}, 1),
        ({"tensor_parallel": 4, "sequence_parallel": True}, 4),
        ({"context_parallel": 2, "tensor_parallel": 4, "sequence_parallel": True}, 8),
    ],
)
def test_alignment(parallel: dict[str, Any], multiple: int) -> None:
    assert required_pad_multiple(**parallel) == multiple


def assert_same_rows(a: PackedRow, b: PackedRow) -> None:
    others = b.tensors()
    for name, one in a.tensors().items():
        torch.testing.assert_close(one, others[name], rtol=0, atol=0, msg=name)
    for name in ("is_padded", "normalisation", "image_layout"):
        assert getattr(a, name) is getattr(b, name), name


@pytest.mark.parametrize("transport", ["float32", "uint8"])
def test_a_row_is_split_into_its_samples(transport: Any) -> None:
    samples = [
        sample("a", 7, images=2),
        sample("bb", 3),
        sample("ccc", 9, images=1, videos=2),
        sample("dddd", 4, videos=1),
    ]
    options: dict[str, Any] = {"pad_token_id": PAD, "multiple": 4, "pixel_transport": transport}
    parts = split_row(concatenate(samples, **options))
    assert [len(part.tokens) for part in parts] == [8, 4, 12, 4]
    for part, single in zip(parts, samples, strict=True):
        assert_same_rows(part, concatenate([single], **options))
    assert_same_rows(merge_rows(parts), concatenate(samples, **options))
    # a segment of padding is nobody's
    padded = concatenate(samples, **options, pad_to_length=40)
    assert_same_rows(merge_rows(split_row(padded)), merge_rows(parts))
    joined = concatenate(samples, **options, cross_sample_attention=True, pad_to_length=40)
    assert len(split_row(joined)) == 1
    assert joined.media_counts.tolist() == [[3, 3], [0, 0]]


@pytest.mark.parametrize("transport", ["float32", "uint8"])
def test_pixels_of_a_micro_batch_are_written_once(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, ...]] = []

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        made.append(shape)
        return np.empty(shape, dtype)

    monkeypatch.setattr(buffers, "empty", empty)
    options: dict[str, Any] = {"pad_token_id": PAD, "pixel_transport": transport}
    own = [sample("a", 7, images=2), sample("bb", 9, images=1, videos=2), sample("ccc", 4)]
    rows = [concatenate([one], **options) for one in own]
    merged = merge_rows(rows)
    assert not made
    pixels = merged.pixel_values
    assert made == [(12, 1176 if transport == "float32" else 588)]
    assert merged.pixel_values is pixels
    assert len(made) == 1
    assert_same_rows(merged, merge_rows([concatenate(own[:2], **options), rows[2]]))
    # rows that were looked at, in another process, or cut
    sent = [pickle.loads(pickle.dumps(row)) for row in rows]
    assert all(isinstance(part, torch.Tensor) for row in sent for part in row.images.parts)
    for one in ([sent[0], rows[1], sent[2]], [*split_row(merged)[:1], *rows[1:]]):
        joined = merge_rows(one)
        assert torch.equal(joined.pixel_values, pixels)
        assert torch.equal(joined.pixel_values_videos, merged.pixel_values_videos)


def test_images_of_one_size_are_split_by_the_image() -> None:
    """A family that has whole images stores one row of pixels for each."""
    whole = [
        replace(sample("a" * n, 5, images=n), image_pixels=np.full((n, 12), n, np.uint8))
        for n in (2, 0, 1)
    ]
    parts = split_row(concatenate(whole, pad_token_id=PAD))
    assert [part.pixel_values[:, 0].tolist() for part in parts] == [[2, 2], [], [1]]
