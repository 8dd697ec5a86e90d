"""The pool gives back every item once, within all limits, and goes on from a saved state."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.online.pools import PackingPool
from offline_packing.planner.windows import WindowOptions
from task_encoders.samples import SampleError
from tests.helpers.windows import window_options

Item = tuple[int, int, int]  # number, tokens, images

streams = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), max_size=120).map(
    lambda sizes: [(number, *size) for number, size in enumerate(sizes)]
)
option_sets = window_options(budgets=st.sampled_from([{}, {"images": 5}, {"images": 9}]))


def add(pool: PackingPool[Item], stream: list[Item]) -> list[list[Item]]:
    return [
        pack for item in stream for pack in pool.add(item, item[1], {"images": item[2], "other": 9})
    ]


@given(stream=streams, options=option_sets)
@settings(max_examples=100, deadline=None)
def test_every_item_comes_back_once_within_all_limits(stream, options):
    pool = PackingPool[Item](options)
    packs = add(pool, stream)
    assert sorted([*chain(*packs), *pool.waiting]) == stream
    packs += pool.finish()
    assert sorted(chain(*packs)) == stream
    assert pool.waiting == []
    for pack in packs:
        assert 0 < sum(tokens for _, tokens, _ in pack) <= options.seq_length
        if options.budgets:
            assert sum(images for _, _, images in pack) <= options.budgets["images"]


@pytest.mark.parametrize(
    ("tokens", "images", "reason"),
    [(11, 0, "overlong"), (3, 3, "over_budget"), (0, 0, "bad_record")],
)
def test_an_item_that_fits_no_pack_is_refused_with_its_reason(tokens, images, reason):
    pool = PackingPool[Item](WindowOptions(seq_length=10, budgets={"images": 2}))
    with pytest.raises(SampleError) as error:
        pool.add((0, tokens, images), tokens, {"images": images})
    assert error.value.reason == reason
    assert pool.waiting == []
