"""Splits and shards: every pack once, in order, no shard over two splits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offline_packing.layouts.shards import lay_out_shards, split_packs
from offline_packing.storage.tars import tar_size


@given(
    num_packs=st.integers(0, 500),
    weights=st.lists(st.integers(1, 100), min_size=1, max_size=5),
)
def test_split_packs(num_packs: int, weights: list[int]) -> None:
    shares = {f"split{i}": weight / sum(weights) for i, weight in enumerate(weights)}
    splits = split_packs(num_packs, shares)
    assert list(splits) == list(shares)
    assert [pack for packs in splits.values() for pack in packs] == list(range(num_packs))
    sizes = [len(packs) for packs in splits.values()]
    assert sum(size > 0 for size in sizes) == min(num_packs, len(shares))
    assert sizes[: min(num_packs, len(shares))].count(0) == 0  # the first splits come first
    if num_packs >= 100 * len(shares):
        for packs, share in zip(splits.values(), shares.values(), strict=True):
            assert abs(len(packs) - share * num_packs) <= len(shares) + 1


def test_split_packs_example() -> None:
    shares = {"train": 0.9, "val": 0.1}
    assert split_packs(100, shares) == {"train": range(90), "val": range(90, 100)}
    assert split_packs(2, shares) == {"train": range(1), "val": range(1, 2)}
    assert split_packs(1, shares) == {"train": range(1), "val": range(1, 1)}


@given(
    pack_bytes=st.lists(st.integers(512, 100_000), min_size=1, max_size=60),
    packs_per_shard=st.integers(1, 20),
    max_shard_bytes=st.none() | st.integers(1, 300_000),
    val_share=st.floats(0.05, 0.5),
)
def test_lay_out_shards(
    pack_bytes: list[int], packs_per_shard: int, max_shard_bytes: int | None, val_share: float
) -> None:
    split = {"train": 1 - val_share, "val": val_share}
    sizes = np.array(pack_bytes, dtype=np.int64)
    shards = lay_out_shards(sizes, split_packs(len(sizes), split), packs_per_shard, max_shard_bytes)
    held = [pack for s in shards for pack in range(s.first_pack, s.first_pack + s.num_packs)]
    assert held == list(range(len(pack_bytes)))
    assert len({shard.name for shard in shards}) == len(shards)
    for name, packs in split_packs(len(pack_bytes), split).items():
        of_split = [shard for shard in shards if shard.split == name]
        assert sum(shard.num_packs for shard in of_split) == len(packs)
        assert [s.name for s in of_split] == [f"{name}-{i:06d}" for i in range(len(of_split))]
    for shard in shards:
        size = sum(pack_bytes[shard.first_pack : shard.first_pack + shard.num_packs])
        assert 1 <= shard.num_packs <= packs_per_shard
        assert shard.num_packs == 1 or tar_size(size) <= (max_shard_bytes or np.inf)
