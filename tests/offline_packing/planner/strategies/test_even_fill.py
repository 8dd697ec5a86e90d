"""Even packs: a given number of them, all samples once, none above seq_length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies.auto import auto
from offline_packing.planner.strategies.even_fill import even_fill
from offline_packing.planner.strategies.histogram import count_lengths, lower_bound


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    num_packs=st.integers(1, 40),
    seed=st.integers(0, 3),
)
def test_all_samples_are_in_the_packs_that_were_asked_for(
    lengths: list[int], num_packs: int, seed: int
) -> None:
    counts = count_lengths(np.array(lengths, np.int32), 30)
    packs = even_fill(counts, num_packs, seed=seed)
    if num_packs < lower_bound(counts):
        assert packs is None
    if packs:
        assert packs.num_packs <= num_packs  # without the empty ones, if there are fewer samples
        assert packs.used_counts(31).tolist() == counts.tolist()
        assert packs.pattern_tokens().max() <= 30


@pytest.mark.parametrize(
    ("low", "high", "num_samples"), [(700, 1400, 20_000), (1400, 3400, 20_000)]
)
def test_as_few_packs_as_the_bound(low: int, high: int, num_samples: int) -> None:
    lengths = np.random.default_rng(0).integers(low, high, num_samples, np.int32)
    counts = count_lengths(lengths, 8192)
    assert auto(counts).num_packs == lower_bound(counts)


def test_more_work_than_allowed_is_refused_at_once() -> None:
    counts = np.zeros(8193, np.int64)
    counts[8] = 10**9
    assert even_fill(counts, 10**6) is None
