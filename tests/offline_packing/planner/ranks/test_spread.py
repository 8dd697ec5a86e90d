"""Steps that leave optimizer steps as much of everything as packs at random would."""

import numpy as np
import pytest

from offline_packing.planner.ranks.deal import (
    BLOCK,
    MAX_LOSS,
    deal_steps,
    similar_steps,
    spread_steps,
)
from offline_packing.planner.ranks.layout import idle_shares


def packs(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cost, tower cost and share of texts: 2% of the packs are texts, which cost least; others have
    a few of them."""
    rng = np.random.default_rng(7)
    texts = np.where(rng.random(count) < 0.02, 1.0, rng.beta(0.3, 6, count))
    tower = np.maximum(0, rng.normal(0.22, 0.05, count)) * (1 - texts)
    return tower + rng.normal(0.78, 0.02, count) - 0.04 * texts, tower, texts


def spread_of(table: np.ndarray, values: np.ndarray) -> float:
    """Standard deviation of the sums over optimizer steps, over that of packs at random."""
    num_ranks = table.shape[1]
    whole = table[: len(table) // BLOCK * BLOCK]
    block = BLOCK * num_ranks
    sums = values[whole].reshape(-1, block).sum(axis=1)
    at_random = values.std() * np.sqrt(block * (1 - block / len(values)))
    return float(sums.std() / at_random)


@pytest.mark.parametrize(("num_ranks", "count"), [(8, 4000), (32, 20_000), (128, 60_032)])
def test_packs_of_their_own_kind_are_spread(num_ranks: int, count: int) -> None:
    cost, tower, texts = packs(count)
    features = np.stack([texts, np.ones(count)], axis=1)
    rng = np.random.default_rng(1)
    table = deal_steps(cost, tower, None, num_ranks, rng, features)
    assert np.array_equal(np.sort(table, axis=None), np.arange(count))
    before = similar_steps(cost, tower, num_ranks)
    assert texts[before].sum(axis=1).max() > 0.9 * num_ranks
    assert spread_of(table, texts) < 1.1
    one, two = idle_shares(cost[table], tower[table])
    assert one < idle_shares(np.sort(cost).reshape(-1, num_ranks), np.zeros(before.shape))[0] + 0.01
    assert two < idle_shares(cost[before], tower[before])[1] + 0.005


def test_they_stay_together_where_the_sum_would_wait_too_long() -> None:
    """Texts that cost half as much as all others."""
    cost, tower, texts = packs(4000)
    cost = np.where(texts == 1, 0.4 * cost, cost)
    table = spread_steps(cost, tower, 32, texts[:, None], texts[:, None])
    by_sum = np.sort(cost).reshape(-1, 32)
    limit = idle_shares(by_sum, np.zeros(by_sum.shape))[0] + MAX_LOSS
    assert idle_shares(cost[table], tower[table])[0] <= limit
    assert np.array_equal(np.sort(table, axis=None), np.arange(4000))
