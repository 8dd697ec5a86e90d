"""Rows of a run that is killed and goes on, on other ranks and loader processes: each pack comes
once per epoch. (Schedules in tests/task_encoders/loading.)"""

import collections
import itertools
from pathlib import Path
from typing import Any

import pytest

from launch.config import DataConfig
from launch.data.micro_batches import build_loader, build_task_encoder
from launch.data.packed_data import read_packed_data
from launch.loop.parallel import initialize_parallel
from launch.loop.setup import build_stages
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.packed_runs import make_config
from tests.helpers.prepared_folders import blend_of


def test_each_pack_of_a_blend_comes_once_per_epoch(
    folder: Path, captions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train a blend of two tasks, which no variable names. Each run trains some steps, saves a
    state, trains on and is killed; the next one continues from the state."""
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    monkeypatch.delenv("OFFLINE_PACKING_BMR", raising=False)  # of other tests of the module
    path = str(blend_of(tmp_path / "blend.yaml", [folder, captions], epochs=1))
    encoder = build_task_encoder(DataConfig(path=path), read_packed_data(path))
    total, seen = len(PackedFolder(path)), collections.Counter[str]()
    state: Any = None
    for ranks, workers, count in ((2, 0, 3), (4, 1, 2), (1, 0, total)):
        config = DataConfig(path=path, order="written", num_workers=workers)
        loaders = [build_loader(config, encoder, rank=r, num_ranks=ranks) for r in range(ranks)]
        for loader in loaders if state else ():
            loader.load_state_dict(state)
        endless = [itertools.chain.from_iterable(itertools.repeat(one)) for one in loaders]
        steps = zip(*endless, strict=True)
        for rows in itertools.islice(steps, count):
            seen.update(key for row in rows for key in row.__key__)
            if ranks == 1 and seen.total() == total:
                break
        states = [loader.state_dict() for loader in loaders]
        next(steps)  # until it is killed
        for loader in loaders:
            loader.close()
        state = states[0]
        assert all(one == state for one in states)
    assert len(seen) == seen.total() == total > 14


@pytest.mark.usefixtures("bmr_environment")
@pytest.mark.parametrize("order", ["balanced", "written"])
def test_the_seed_of_a_run_decides_its_order(order: str, folder: Path, tmp_path: Path) -> None:
    """But for packs in the order written."""
    orders = []
    for seed in (0, 0, 7):
        data: dict[str, Any] = {"order": order, "repeat": False}
        config = make_config(folder, tmp_path, data=data, train={"seed": seed})
        (stage,), _ = build_stages(config, [read_packed_data(folder)], initialize_parallel())
        orders.append([row.__key__ for row in iter(stage.train.next, None)])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(orders[2])
    assert (orders[0] == orders[2]) == (order == "written")
