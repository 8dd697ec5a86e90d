"""Splits and shards of every layout, and files that are not ours."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_packing.layouts.shards import lay_out_shards
from offline_packing.storage.tars import tar_size
from offline_packing.verify.verify import verify
from tests.helpers.datasets import packed_run
from tests.world import World, copy_of


@pytest.mark.parametrize("layout", ["energon", "references"])
def test_what_is_not_ours_stays_when_packs_are_overwritten(
    world: World, tmp_path: Path, layout: str
) -> None:
    """Though other layouts, or other splits, would give their files such names."""
    copy_of(world.run("captioning", output={"layout": layout}), tmp_path / "out")
    others = [tmp_path / "out" / name for name in ("notes.jsonl", "packed_seq_dataset_my.bin")]
    for path in others:
        path.write_text("mine")
    output = {"layout": layout, "key_prefix": "new-", "overwrite": True}
    again = packed_run(world.source("captioning"), tmp_path / "out", output=output)
    assert verify(again).ok
    assert [path.read_text() for path in others] == ["mine", "mine"]


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
