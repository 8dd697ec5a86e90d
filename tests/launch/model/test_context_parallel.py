"""Parts of a row of ranks that share it; and what cannot be divided, or computed."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.model.config import ModelConfig
from launch.model.megatron.context_parallel import part_of_rank
from launch.model.megatron.model import check_supported
from launch.model.megatron.tower import share_frames
from tests.helpers.tiny_checkpoints import params_of


def test_segments_are_cut_zigzag() -> None:
    """As in the module's example."""
    parts = [part_of_rank(params_of([4, 8]), 2, rank) for rank in range(2)]
    assert [part.own.tolist() for part in parts] == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    assert parts[1].cu_seqlens_q.tolist() == [0, 1, 2, 4, 6]
    assert parts[1].cu_seqlens_kv.tolist() == [0, 2, 5, 9, 15]


def test_segments_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"segments of \[4, 6\] tokens .* \(pad_multiple=4\)"):
        part_of_rank(params_of([4, 6]), 2, 0)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 4), flops=st.lists(st.integers(1, 50), max_size=7))
def test_frames_are_shared_as_evenly_as_order_allows(size: int, flops: list[int]) -> None:
    bounds = share_frames(np.array(flops, np.float64), size)
    ways = itertools.combinations_with_replacement(range(len(flops) + 1), size - 1)
    most = min(max(shares([0, *way, len(flops)], flops)) for way in ways)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(flops), size + 1)
    assert max(shares(bounds, flops)) == most


def shares(bounds: Sequence[int], flops: Sequence[int]) -> list[int]:
    return [sum(flops[start:end]) for start, end in itertools.pairwise(bounds)]


PARTIAL = {"rope_type": "default", "mrope_section": [1], "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rope_parameters", {"rope_type": "yarn"}, "'yarn'} are not supported"),
        ("rope_parameters", {"rope_type": "default"}, "'default'} are not supported"),
        ("rope_parameters", PARTIAL, "'partial_rotary_factor': 0.5} are not supported"),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
        ("layer_types", ["full_attention", "sliding_attention"], "use_sliding_window"),
        ("num_key_value_heads", 1, "num_key_value_heads 1 cannot be divided by tensor_parallel 2"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(field: str, value: Any, message: str) -> None:
    text_config = ModelConfig(preset="tiny").build_transformers_config().text_config
    check_supported(text_config, 2)
    setattr(text_config, field, value)
    with pytest.raises(ValueError, match=message):
        check_supported(text_config, 2)
