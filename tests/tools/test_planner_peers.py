"""Peers are called as their projects call them."""

import importlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "benchmarks"


def test_ms_swift_carries_its_last_pack_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples fill a pack: 1,000 leave one over, which the next window takes in."""
    pytest.importorskip("binpacking")
    monkeypatch.syspath_prepend(str(TOOLS))
    peers = importlib.import_module("planner_peers")
    function = peers.PEERS["ms-swift (windows of 1,000, last pack carried)"].function
    packs = function([300] * 2000, 1000)
    assert sorted(index for pack in packs for index in pack) == list(range(2000))
    assert len(packs) == 667  # windows by themselves make 668
