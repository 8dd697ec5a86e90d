"""The order of steps: blocks that make up for each other."""

import numpy as np
import pytest

from offline_packing.planner.ranks.deal import BLOCK, deal_steps, even_order


@pytest.mark.parametrize("count", [0, 1, 7, 8, 83, 400])
def test_every_step_comes_once(count: int) -> None:
    features = np.random.default_rng(count).normal(size=(count, 2))
    order = even_order(features, np.random.default_rng(1))
    assert np.array_equal(np.sort(order), np.arange(count))
    assert np.array_equal(order, even_order(features, np.random.default_rng(1)))


def test_blocks_are_closer_to_the_mean_than_at_random() -> None:
    rng = np.random.default_rng(5)
    features = np.concatenate([rng.lognormal(size=(403, 3)), np.ones((403, 1))], axis=1)

    def spread(order: np.ndarray) -> np.ndarray:
        return np.asarray(features[order[:400]].reshape(-1, BLOCK, 4).sum(axis=1).std(axis=0))

    even = spread(even_order(features, np.random.default_rng(0)))
    assert (even[:3] < 0.4 * spread(rng.permutation(403))[:3]).all()


def test_no_step_holds_a_pack_twice_if_there_are_enough() -> None:
    rng = np.random.default_rng(2)
    for count in range(1, 40):
        kinds = rng.integers(0, 2, count)
        table = deal_steps(rng.random(count), None, kinds, 5, np.random.default_rng(count))
        for step in table:
            enough = (kinds == kinds[step[0]]).sum() >= 5
            assert len(set(step.tolist())) == 5 or not enough
