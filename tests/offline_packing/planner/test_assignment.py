"""Locality and balance: what they promise, at the same fill."""

import numpy as np
import pytest

from offline_packing import plan_packs
from offline_packing.planner.exchange import balance_packs
from offline_packing.planner.strategies.strategy import Packs


def caption_lengths(num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Images with captions, and their vision patches: four for each vision token."""
    rng = np.random.default_rng(7)
    tokens = np.clip(np.exp(rng.normal(6.0, 0.8, num_samples)), 16, 8192).astype(np.int64)
    return tokens, (tokens * rng.uniform(0.3, 0.98, num_samples)).astype(np.int64) * 4


def pack_sums(plan, values: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values[plan.sample_ids], plan.pack_offsets[:-1])


def variation(values: np.ndarray) -> float:
    return float(values.std() / values.mean())


def read_per_written(plan, packs_per_shard: int) -> float:
    """Samples read in blocks of ten by all output shards, per sample written."""
    shard = np.repeat(np.arange(plan.num_packs) // packs_per_shard, np.diff(plan.pack_offsets))
    blocks = np.unique(np.stack([shard, plan.sample_ids // 10]), axis=1)
    return 10 * blocks.shape[1] / len(plan.sample_ids)


def test_balance_evens_patches_out_in_as_many_packs() -> None:
    tokens, patches = caption_lengths(40_000)
    plain = plan_packs(tokens, 8192)
    even = plan_packs(tokens, 8192, assignment=["shuffle", "balance"], balance_by=patches)
    assert even.num_packs == plain.num_packs
    assert sorted(even.sample_ids.tolist()) == list(range(40_000))
    assert pack_sums(even, tokens).max() <= 8192
    assert variation(pack_sums(even, patches)) < variation(pack_sums(plain, patches)) / 3


def test_balance_exchanges_twos_of_equal_sum() -> None:
    # No two lengths are equal, but 2 + 3 = 1 + 4: sums of 12 and 0 become 6 and 6. The groups are
    # drawn at random, so not every seed meets these two.
    packs = Packs(np.array([0, 1, 2, 3, 4, 5]), np.array([0, 3, 6]))
    lengths = np.array([2, 3, 7, 1, 4, 10])
    quantity = np.array([3, 3, 6, 0, 0, 0])
    found = set()
    for seed in range(20):
        even = balance_packs(packs, lengths, quantity, seed=seed)
        found.add(tuple(sorted(lengths[even.sample_ids[:3]].tolist())))
    assert found == {(2, 3, 7), (1, 4, 7)}


@pytest.mark.parametrize("seed", range(5))
def test_balance_keeps_samples_and_tokens_of_every_pack(seed) -> None:
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 9, 500))])
    lengths = rng.integers(1, 40, offsets[-1])
    patches = rng.integers(0, 4 * lengths + 1)
    packs = Packs(rng.permutation(offsets[-1]), offsets)
    even = balance_packs(packs, lengths, patches, window_packs=100, seed=seed)
    assert sorted(even.sample_ids.tolist()) == list(range(offsets[-1]))
    before, after = (np.add.reduceat(lengths[p.sample_ids], offsets[:-1]) for p in (packs, even))
    assert after.tolist() == before.tolist()
    spread = [np.add.reduceat(patches[p.sample_ids], offsets[:-1]).std() for p in (packs, even)]
    assert spread[1] < spread[0]
    for start in range(0, 500, 100):
        stretch = slice(offsets[start], offsets[start + 100])
        assert set(packs.sample_ids[stretch]) == set(even.sample_ids[stretch])


def test_locality_reads_few_source_shards_in_order() -> None:
    tokens, _ = caption_lengths(60_000)
    source_shard = np.arange(60_000) // 10_000
    packs_per_shard = 500
    plan = plan_packs(
        tokens,
        8192,
        assignment="locality",
        source_order=np.arange(60_000),
        window_packs=packs_per_shard,
    )
    assert sorted(plan.sample_ids.tolist()) == list(range(60_000))
    assert plan.num_packs <= plan.info.lower_bound + 3
    opened = [
        np.unique(source_shard[plan.sample_ids[plan.pack_offsets[i] : plan.pack_offsets[j]]])
        for i, j in zip(
            range(0, plan.num_packs, packs_per_shard),
            [*range(packs_per_shard, plan.num_packs, packs_per_shard), plan.num_packs],
            strict=True,
        )
    ]
    # A stretch of one output shard spans two source shards at most, what is carried one more.
    assert max(map(len, opened)) <= 3
    assert np.mean([len(shards) for shards in opened]) <= 2.2
    assert all(np.diff(shards).max(initial=0) <= 1 for shards in opened)
    assert read_per_written(plan, packs_per_shard) < 1.1


def test_locality_with_balance_stays_within_windows() -> None:
    tokens, patches = caption_lengths(20_000)
    arguments = {"source_order": np.arange(20_000), "window_packs": 300}
    plain = plan_packs(tokens, 8192, assignment="locality", **arguments)
    even = plan_packs(
        tokens, 8192, assignment=["locality", "balance"], balance_by=patches, **arguments
    )
    assert even.num_packs == plain.num_packs
    assert variation(pack_sums(even, patches)) < 0.9 * variation(pack_sums(plain, patches))
    for start in range(0, plain.num_packs, 300):
        stretch = slice(
            plain.pack_offsets[start], plain.pack_offsets[min(start + 300, plain.num_packs)]
        )
        assert set(plain.sample_ids[stretch]) == set(even.sample_ids[stretch])
