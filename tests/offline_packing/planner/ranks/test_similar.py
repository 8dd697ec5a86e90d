"""Steps of packs that cost alike in both phases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.ranks.deal import similar_steps
from offline_packing.planner.ranks.layout import idle_shares, phase_times


def drawn(count: int, seed: int, texts: float) -> tuple[np.ndarray, np.ndarray]:
    """Cost and tower cost; a share of the packs has no pictures."""
    rng = np.random.default_rng(seed)
    tower = rng.lognormal(0, 1, count) * (rng.random(count) >= texts)
    return tower + rng.lognormal(1, 0.5, count), tower


@pytest.mark.parametrize("seed", range(10))
def test_near_the_best_of_all_deals(seed: int) -> None:
    """All pairings of eight packs, tried one by one."""
    cost, tower = drawn(8, seed, 0.3)

    def pairings(left: list[int]) -> list[list[list[int]]]:
        if not left:
            return [[]]
        first, *others = left
        return [
            [[first, other], *rest]
            for other in others
            for rest in pairings([one for one in others if one != other])
        ]

    every = np.array(pairings(list(range(8))))
    assert len(every) == 105
    times = [phase_times(cost[steps], tower[steps]).sum() for steps in every]
    allowed = idle_shares(*(x[np.argsort(cost).reshape(-1, 2)] for x in (cost, tower)))[0] + 0.01
    fair = [idle_shares(cost[steps], tower[steps])[0] <= allowed for steps in every]
    steps = similar_steps(cost, tower, 2)
    found = phase_times(cost[steps], tower[steps]).sum()
    assert found <= 1.05 * np.array(times)[fair].min()


@given(
    st.integers(0, 99), st.integers(1, 9), st.integers(1, 40), st.sampled_from([0.0, 0.5, 0.9, 1.0])
)
@settings(max_examples=60, deadline=None)
def test_never_worse_than_sorted(seed: int, num_ranks: int, steps: int, texts: float) -> None:
    """And the sum's idle share is never a point worse."""
    cost, tower = drawn(steps * num_ranks, seed, texts)
    table = similar_steps(cost, tower, num_ranks)
    assert np.array_equal(np.sort(table.ravel()), np.arange(len(cost)))
    by_sum = np.argsort(cost).reshape(-1, num_ranks)
    (one, two), (best_one, sorted_two) = (
        idle_shares(cost[some], tower[some]) for some in (table, by_sum)
    )
    assert two <= sorted_two + 1e-9
    assert one <= best_one + 0.01 + 1e-9
