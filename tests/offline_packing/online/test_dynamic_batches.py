"""Dynamic batches: every published example, VeOmni's own test, padding, what is set aside."""

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.errors import StageError
from offline_packing.online.collate import padding_free_collator
from offline_packing.online.datasets import DynamicBatches
from tests.helpers.online_samples import Indexed, lettered, numbered


def batches(*lengths: int, **options: Any) -> list[dict[str, Any]]:
    return list(DynamicBatches(lettered(*lengths), **options))


def numbers(lengths: Any, **options: Any) -> list[list[int]]:
    samples = Indexed(numbered(lengths))
    return list(DynamicBatches(samples, collate=lambda b: [s["number"] for s in b], **options))


def test_a_fixed_number_takes_two_and_two() -> None:
    first, second = batches(4, 2, 3, 1, dyn_bsz=False, micro_batch_size=2, max_seq_len=4)
    assert first["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]
    assert second["input_ids"].tolist() == [[7, 8, 9, 10]]


@pytest.mark.parametrize(
    ("lengths", "pad_to_length", "options"),
    [
        ((4, 2, 3, 1), None, {"max_seq_len": 10}),
        ((4, 2), 8, {"dyn_bsz": False, "micro_batch_size": 2, "max_seq_len": 4}),
        ((3, 2, 2), 10, {"max_seq_len": 10}),
        # True: the length follows from micro_batch_size × max_seq_len
        ((4, 1), True, {"micro_batch_size": 2, "max_seq_len": 4}),
        ((3, 2), True, {"dyn_bsz": False, "micro_batch_size": 2, "max_seq_len": 4}),
    ],
)
def test_a_batch_is_the_collators_row(lengths, pad_to_length, options) -> None:
    """The published examples, whose values the collator's own tests have."""
    (row,) = batches(*lengths, **options, pad_to_length=pad_to_length or False, pad_token_id=7)
    length = 8 if pad_to_length is True else pad_to_length
    expected = padding_free_collator(lettered(*lengths), pad_to_length=length, pad_token_id=7)
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(row[name]), torch.as_tensor(value)), name


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
