"""Peers are called as their projects call them."""

import pytest

from tests.helpers.tools import benchmark


def test_ms_swift_carries_its_last_pack_over() -> None:
    """Three samples fill a pack: 1,000 leave one over, which the next window takes in."""
    pytest.importorskip("binpacking")
    function = (
        benchmark("planner_peers").PEERS["ms-swift (windows of 1,000, last pack carried)"].function
    )
    packs = function([300] * 2000, 1000)
    assert sorted(index for pack in packs for index in pack) == list(range(2000))
    assert len(packs) == 667  # windows by themselves make 668
