"""Samples that begin alike, as a trunk and branches of one row."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from task_encoders.concatenate import PackedRow, concatenate, merge_rows, split_row
from task_encoders.energon_samples import empty_batch
from task_encoders.model_inputs import pad_batch, to_packed_seq_params, to_transformers_kwargs
from task_encoders.rows.trees import as_tree
from task_encoders.sample_encoder import EncodedSample
from tests.helpers.tiny_checkpoints import NORMALISATION

SHARED = 6


def sample(number: int, length: int, images: int = 1, *, first: bool = False) -> EncodedSample:
    """A sample whose first `SHARED` tokens, and its first image of 8 patches, all have."""
    rng, common = np.random.default_rng(number), np.random.default_rng(99)
    tokens = np.append(common.integers(0, 100, SHARED), rng.integers(0, 100, length - SHARED))
    weights = np.ones(length, np.float32)
    weights[: SHARED + (not first)] = 0
    pixels = [common.integers(0, 256, (8, 12), dtype=np.uint8)]
    pixels += [rng.integers(0, 256, (4, 12), dtype=np.uint8) for _ in range(images - 1)]
    grids = [[1, 2, 4], *[[1, 2, 2]] * (images - 1)]
    return EncodedSample(
        key=str(number),
        tokens=tokens,
        loss_weights=weights,
        position_ids=np.tile(np.arange(length), (3, 1)),
        image_pixels=np.concatenate(pixels),
        image_grid_thw=np.array(grids, np.int32),
        video_pixels=np.empty((0, 24), np.uint8),
        video_grid_thw=np.empty((0, 3), np.int32),
        normalisation=NORMALISATION,
    )


SAMPLES = [sample(0, 9), sample(1, 8, images=3), sample(2, 14, images=2)]
ALONE = replace(sample(7, 5 + SHARED), key="alone")


def row(multiple: int = 1, pad_to_length: int | None = None) -> PackedRow:
    segments = [ALONE, *as_tree(SAMPLES, SHARED, 1, 0), ALONE]
    parents = [-1, -1, 1, 1, 1, -1]
    return concatenate(
        segments, pad_token_id=0, parents=parents, multiple=multiple, pad_to_length=pad_to_length
    )


def same(found: PackedRow, expected: PackedRow) -> None:
    for name in ("tokens", "loss_weights", "position_ids", "pixel_values", "image_grid_thw"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.media_counts.tolist() == expected.media_counts.tolist()


def test_each_token_and_picture_stands_once() -> None:
    found = row()
    assert found.cu_lengths.diff().tolist() == [11, 6, 3, 2, 8, 11]
    assert found.parents.tolist() == [-1, -1, 1, 1, 1, -1]
    assert found.media_counts[:, 0].tolist() == [1, 1, 0, 2, 1, 1]
    assert len(found.pixel_values) == 8 * 3 + 4 * 3
    assert found.position_ids[0, 17:20].tolist() == [6, 7, 8]


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_row_gives_back_its_samples(multiple: int) -> None:
    given = [ALONE, *SAMPLES, ALONE]
    found = split_row(merge_rows([row(multiple, 80), row()]))
    assert len(found) == 2 * len(given)
    for part, one in zip(found, [*given, *given], strict=True):
        same(split_row(replace(part, attn_mask=part.attn_mask))[0], part)
        real = ~part.attn_mask
        expected = concatenate([one], pad_token_id=0)
        assert part.tokens[real].tolist() == one.tokens.tolist()
        assert torch.equal(part.position_ids[:, real], expected.position_ids)
        assert torch.equal(part.loss_weights[real], expected.loss_weights)
        assert torch.equal(part.pixel_values, expected.pixel_values)
        assert part.media_counts.tolist() == expected.media_counts.tolist()


def test_a_tree_is_padded_as_a_whole() -> None:
    found = row(multiple=8)
    assert found.cu_lengths.diff().tolist() == [16, 6, 3, 2, 13, 16]
    assert int(found.attn_mask.sum()) == 5 + 5 + 5


def test_a_first_token_that_is_trained_is_predicted_in_each_branch() -> None:
    captions = [sample(0, 9, first=True), sample(1, 8)]
    trunk, *branches = as_tree(captions, SHARED, 1, 0)
    assert trunk.tokens.tolist() == captions[0].tokens[: SHARED - 1].tolist()
    for branch, one in zip(branches, captions, strict=True):
        assert branch.tokens.tolist() == one.tokens[SHARED - 1 :].tolist()
        assert branch.loss_weights[0] == 0


def other_pixels(one: EncodedSample) -> EncodedSample:
    return replace(one, image_pixels=one.image_pixels + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: replace(one, tokens=one.tokens + 1), "does not begin as"),
        (lambda one: replace(one, position_ids=one.position_ids + 1), "does not begin as"),
        (lambda one: replace(one, image_grid_thw=one.image_grid_thw[:, ::-1]), "does not begin as"),
        (lambda one: replace(one, tokens=one.tokens[:SHARED]), "does not begin as"),
        (other_pixels, "does not begin as"),
        (lambda one: replace(one, loss_weights=np.ones_like(one.loss_weights)), "has loss in the"),
    ],
)
def test_what_is_not_shared_is_refused(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_tree([SAMPLES[0], change(SAMPLES[1])], SHARED, 1, 0)


def test_whoever_knows_no_trees_refuses_them() -> None:
    batch = pad_batch(replace(empty_batch(3, 8), cu_lengths=torch.tensor([[0, 5, 8]])), 12, 0)
    to_packed_seq_params(batch)
    batch = replace(batch, parents=torch.tensor([[-1, 0, -1]], dtype=torch.int32))
    assert pad_batch(batch, 16, 0).parents.tolist() == [[-1, 0, -1, -1]]
    for give in (to_packed_seq_params, to_transformers_kwargs):
        with pytest.raises(ValueError, match="holds prefix trees"):
            give(batch)
    assert to_packed_seq_params(batch, trees=True) is not None
