"""Cut conversations give the same bytes on any engine, after a kill, after damage."""

import pytest

from offline_packing.index.table import part_name
from offline_packing.measure.measure import measure
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from tests.helpers.datasets import pack_all
from tests.helpers.long_conversations import regrouped
from tests.helpers.outputs import shard_files
from tests.helpers.repairs import repair


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An output whose index has three parts."""
    run = regrouped(tmp_path_factory.mktemp("regrouped"), "out")
    pack_all(run)
    return run


def test_all_of_it_happens(packed: Run) -> None:
    info = open_index(packed).info
    assert len(info.part_rows) == 3
    assert info.split["conversations"] > 10


def test_the_same_bytes_on_workers_and_after_damage(packed: Run) -> None:
    expected = shard_files(packed)
    spread = regrouped(packed.workspace.root.parent, "workers", engine={"workers": 2})
    pack_all(spread)
    assert shard_files(spread) == expected
    part = spread.workspace.index / part_name(1)
    whole = part.read_bytes()
    part.write_bytes(whole[:100])
    repair(spread)
    assert part.read_bytes() == whole
    assert shard_files(spread) == expected


def test_the_same_bytes_after_a_kill(packed: Run) -> None:
    stopped = regrouped(packed.workspace.root.parent, "killed")
    measure(stopped)
    part = stopped.workspace.index / part_name(1)
    whole = part.read_bytes()
    stopped.workspace.index_info.unlink()
    part.unlink()
    (stopped.workspace.index / part_name(2)).write_bytes(b"cut")
    pack_all(stopped)
    assert part.read_bytes() == whole
    assert shard_files(stopped) == shard_files(packed)
