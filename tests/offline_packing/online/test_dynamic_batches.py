"""Dynamic batches: every published example, VeOmni's own test, padding, what is set aside."""

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.errors import StageError
from offline_packing.online.dynamic_batches import DynamicBatches
from task_encoders.packs.tokenized import IGNORE_INDEX
from tests.helpers.online_samples import Indexed, lettered, numbered


def batches(*lengths: int, **options: Any) -> list[dict[str, Any]]:
    return list(DynamicBatches(lettered(*lengths), **options))


def numbers(lengths: Any, **options: Any) -> list[list[int]]:
    samples = Indexed(numbered(lengths))
    return list(DynamicBatches(samples, collate=lambda b: [s["number"] for s in b], **options))


def test_a_budget_of_ten_takes_all_four() -> None:
    (row,) = batches(4, 2, 3, 1, max_seq_len=10)
    assert row["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 0]]
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == [0, 4, 6, 9, 10]
    assert row["max_length_q"] == row["max_length_k"] == 4


def test_a_fixed_number_takes_two_and_two() -> None:
    first, second = batches(4, 2, 3, 1, dyn_bsz=False, micro_batch_size=2, max_seq_len=4)
    assert first["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]
    assert first["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert second["input_ids"].tolist() == [[7, 8, 9, 10]]
    assert second["position_ids"].tolist() == [[0, 1, 2, 0]]


@pytest.mark.parametrize(
    ("lengths", "options", "input_ids", "cu_seqlens"),
    [
        (
            (4, 2),
            {"dyn_bsz": False, "micro_batch_size": 2, "max_seq_len": 4, "pad_to_length": 8},
            [1, 2, 3, 4, 5, 6, 0, 0],
            [0, 4, 6, 8],
        ),
        (
            (3, 2, 2),
            {"max_seq_len": 10, "pad_to_length": 10},
            [1, 2, 3, 4, 5, 6, 7, 0, 0, 0],
            [0, 3, 5, 7, 10],
        ),
        (  # the length follows from micro_batch_size × max_seq_len
            (4, 1),
            {"micro_batch_size": 2, "max_seq_len": 4, "pad_to_length": True},
            [1, 2, 3, 4, 5, 0, 0, 0],
            [0, 4, 5, 8],
        ),
        (
            (3, 2),
            {"dyn_bsz": False, "micro_batch_size": 2, "max_seq_len": 4, "pad_to_length": True},
            [1, 2, 3, 4, 5, 0, 0, 0],
            [0, 3, 5, 8],
        ),
    ],
)
@pytest.mark.parametrize("pad_token_id", [0, 7])
def test_padding_after_merging(lengths, options, input_ids, cu_seqlens, pad_token_id) -> None:
    (row,) = batches(*lengths, **options, pad_token_id=pad_token_id)
    assert row["input_ids"].tolist() == [[token or pad_token_id for token in input_ids]]
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == cu_seqlens
    starts = torch.tensor(cu_seqlens[:-1]).repeat_interleave(torch.tensor(cu_seqlens).diff())
    assert torch.equal(row["position_ids"][0], torch.arange(cu_seqlens[-1]) - starts)
    padding = input_ids.count(0)
    assert row["labels"][0, -padding:].tolist() == [IGNORE_INDEX] * padding
    assert row["max_length_q"] == int(torch.tensor(cu_seqlens).diff().max())


def test_batches_are_those_of_veomni() -> None:
    """The case of its own test, and the batches that its 0.1.12 makes of the whole of it."""
    found = numbers(range(1, 51), max_seq_len=32, buffer_size=10)
    tokens = [sum(number + 1 for number in batch) for batch in found]
    assert tokens[:5] == [28, 27, 23, 27, 31]
    assert tokens[5:] == list(range(17, 33))  # each alone; 33 and more are set aside
    shuffled = torch.randperm(50, generator=torch.Generator().manual_seed(42)) + 1
    found = numbers(shuffled.tolist(), max_seq_len=32, buffer_size=10)[:5]
    expected = [[18, 1, 9, 4], [31], [21, 3, 2], [26, 6], [19, 7]]
    assert [shuffled[batch].tolist() for batch in found] == expected


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    dyn_bsz=st.booleans(),
    micro_batch_size=st.integers(1, 4),
    buffer_size=st.integers(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_every_sample_is_in_one_batch(lengths, dyn_bsz, micro_batch_size, buffer_size) -> None:
    options = {"dyn_bsz": dyn_bsz, "micro_batch_size": micro_batch_size, "max_seq_len": 40}
    found = numbers(lengths, buffer_size=buffer_size, **options)
    assert sorted(chain(*found)) == list(range(len(lengths)))
    if dyn_bsz:
        totals = [sum(lengths[number] for number in batch) for batch in found]
        assert max(totals) <= 40 * micro_batch_size
    else:
        assert [len(batch) for batch in found[:-1]] == [micro_batch_size] * (len(found) - 1)


def test_overlong_samples_are_set_aside() -> None:
    for dyn_bsz, limit in ((True, 20), (False, 10)):
        samples = DynamicBatches(
            lettered(3, limit + 1, limit), dyn_bsz=dyn_bsz, micro_batch_size=2, max_seq_len=10
        )
        rows = list(samples)
        assert sum(row["input_ids"].shape[1] for row in rows) == 3 + limit
        assert samples.set_aside == {"overlong": 1}


def test_arguments_and_empty_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="buffer_size is 0; it must be at least 1"):
        DynamicBatches([], max_seq_len=8, buffer_size=0)
    with pytest.raises(ValueError, match=r"pad_to_length is 9, less than .* = 16"):
        DynamicBatches([], micro_batch_size=2, max_seq_len=8, pad_to_length=9)
    with pytest.raises(StageError, match="the dataset is empty"):
        batches(max_seq_len=8)
