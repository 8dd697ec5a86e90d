"""Pictures that divide evenly by their number among the ranks of a pack."""

import itertools

import numpy as np
import pytest

from offline_packing.planner.plan_packs import plan_packs
from offline_packing.planner.ranks.picture_split import SplitFigures, even_samples, split_figures
from offline_packing.planner.strategies.strategy import Packs
from tests.helpers.pack_lists import as_lists


def drawn(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens in few different lengths, pictures, and their operations; a third are text."""
    rng = np.random.default_rng(seed)
    units = rng.choice([0, 1, 1, 2, 5], count)
    return rng.integers(5, 60, count) * 8, units, units * rng.lognormal(0, 1, count)


def slow_figures(packs: list[list[int]], units: np.ndarray, tower: np.ndarray, size: int) -> float:
    """Idle share, with a list of all pictures cut as Megatron-Bridge cuts it."""
    spent = taken = 0.0
    for pack in packs:
        pictures = [tower[i] / units[i] for i in pack for _ in range(units[i])]
        counts = [len(pictures) // size + (r < len(pictures) % size) for r in range(size)]
        ends = list(itertools.accumulate(counts, initial=0))
        shares = [sum(pictures[a:b]) for a, b in itertools.pairwise(ends)]
        spent, taken = spent + sum(shares), taken + max(shares) * size
    return 1 - spent / taken


def test_the_example_of_the_module() -> None:
    tower = np.array([9.0, 8, 2, 1, 1, 1])
    packs, ones = Packs(np.arange(6), np.array([0, 6])), np.ones(6, int)
    before = split_figures(packs, ones, tower, 2)
    assert before.idle == pytest.approx(1 - 22 / 38)
    after = even_samples(packs, ones, tower, 2)
    assert split_figures(after, ones, tower, 2) == SplitFigures(0.0, 0)
    assert split_figures(after, ones, tower, 3).num_unequal == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_order_evens_shares_and_keeps_packs(size: int) -> None:
    tokens, units, tower = drawn(400)
    plan = plan_packs(tokens, 2048, seed=3)
    packs = Packs(plan.sample_ids, plan.pack_offsets)
    after = even_samples(packs, units, tower, size)
    assert list(map(sorted, as_lists(after))) == list(map(sorted, as_lists(packs)))
    text = units[packs.sample_ids] == 0
    assert np.array_equal(after.sample_ids[text], packs.sample_ids[text])
    idle = [split_figures(some, units, tower, size).idle for some in (packs, after)]
    slow = [slow_figures(as_lists(some), units, tower, size) for some in (packs, after)]
    assert idle == pytest.approx(slow)
    assert idle[1] < 0.7 * idle[0]
