"""Splits and shards: every pack once, in order, no shard over two splits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offline_packing.layouts.shards import lay_out_shards
from offline_packing.storage.tars import tar_size


@given(
    pack_bytes=st.lists(st.integers(512, 100_000), min_size=1, max_size=60),
    packs_per_shard=st.integers(1, 20),
    max_shard_bytes=st.none() | st.integers(1, 300_000),
    val_share=st.floats(0.05, 0.5),
)
def test_lay_out_shards(
    pack_bytes: list[int], packs_per_shard: int, max_shard_bytes: int | None, val_share: float
) -> None:
    first = round(len(pack_bytes) * (1 - val_share))
    splits = {"train": range(first), "val": range(first, len(pack_bytes))}
    sizes = np.array(pack_bytes, dtype=np.int64)
    shards = lay_out_shards(sizes, splits, packs_per_shard, max_shard_bytes)
    held = [pack for s in shards for pack in range(s.first_pack, s.first_pack + s.num_packs)]
    assert held == list(range(len(pack_bytes)))
    assert len({shard.name for shard in shards}) == len(shards)
    for name, packs in splits.items():
        of_split = [shard for shard in shards if shard.split == name]
        assert sum(shard.num_packs for shard in of_split) == len(packs)
        assert [s.name for s in of_split] == [f"{name}-{i:06d}" for i in range(len(of_split))]
    for shard in shards:
        size = sum(pack_bytes[shard.first_pack : shard.first_pack + shard.num_packs])
        assert 1 <= shard.num_packs <= packs_per_shard
        assert shard.num_packs == 1 or tar_size(size) <= (max_shard_bytes or np.inf)
