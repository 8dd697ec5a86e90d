"""Samples that can be packed at all, and messages on bad input."""

import numpy as np
import pytest

from offline_packing.planner.samples import admit_samples


def test_reasons_are_aligned_and_ordered() -> None:
    tokens = np.array([10, 0, 200, 50, 50, 100])
    patches = np.array([1, 1, 9, 9, 1, 4])
    images = np.array([1, 1, 1, 5, 1, 3])
    result = admit_samples(tokens, 100, budgets={"patches": (patches, 4), "images": (images, 2)})
    assert result.sample_ids is not None
    assert result.sample_ids.tolist() == [0, 4]
    reasons = [result.reason_names[code] for code in result.set_aside_reasons]
    assert dict(zip(result.set_aside_ids.tolist(), reasons, strict=True)) == {
        1: "empty",
        2: "over_seq_length",
        3: "over_budget:patches",
        5: "over_budget:images",
    }


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64])
def test_any_integer_type_is_accepted_and_lengths_are_padded(dtype) -> None:
    result = admit_samples(np.array([1, 8, 9, 100], dtype), 100, multiple=8)
    # 100 pads to 104 > 100, so it cannot be packed at this multiple.
    assert result.samples.lengths.tolist() == [8, 8, 16]
    assert result.samples.lengths.dtype == np.int32
    assert result.set_aside_ids.tolist() == [3]


def test_lengths_beyond_int32_are_set_aside() -> None:
    result = admit_samples(np.array([2**40, 3]), 10)
    assert result.set_aside_ids.tolist() == [0]
    assert result.samples.lengths.tolist() == [3]


def test_input_is_not_changed() -> None:
    tokens = np.arange(1, 20, dtype=np.int32)
    tokens.setflags(write=False)
    lengths = admit_samples(tokens, 32).samples.lengths
    assert lengths.flags.writeable
    assert lengths.tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"num_tokens": np.array([3, -2])}), r"num_tokens\[1\] is -2 < 0"),
        (({"num_tokens": np.array([1.5])}), "one-dimensional integer"),
        (({"num_tokens": np.array([[1]])}), "one-dimensional integer"),
        (({"budgets": {"patches": (np.array([1]), 4)}}), "1 entries for 2 samples"),
        (({"budgets": {"patches": (np.array([1, 1]), 0)}}), "limit 0"),
        (({"budgets": {"patches": (np.array([1, -1]), 3)}}), r"budgets\['patches'\]\[1\] is -1"),
    ],
)
def test_bad_arguments_are_named(arguments, message) -> None:
    valid = {"num_tokens": np.array([3, 2]), "seq_length": 8}
    with pytest.raises(ValueError, match=message):
        admit_samples(**{**valid, **arguments})
