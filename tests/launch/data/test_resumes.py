"""Runs that are killed and go on, on other ranks and loader processes, in every order of the packs:
each pack comes once per epoch, but for those that a schedule names twice.

A leg trains some steps, saves a state, trains on and is killed; the next goes on from the state.
"""

import collections
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.config import DataConfig
from launch.data.micro_batches import build_loader, build_task_encoder
from launch.data.packed_data import read_packed_data
from launch.loop.parallel import initialize_parallel
from launch.loop.setup import build_trainer
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.schedule import ScheduledLoader
from tests.helpers.object_store import ObjectStore
from tests.helpers.packed_runs import WHOLE_VOCABULARY, make_config
from tests.helpers.prepared_folders import blend_of

pytestmark = pytest.mark.usefixtures("bmr_environment")


@pytest.fixture
def packed(kind: str, folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if kind == "blend":  # of two tasks, which no variable names
        request.getfixturevalue("monkeypatch").delenv("OFFLINE_PACKING_BMR")
        parts = [folder, request.getfixturevalue("captions")]
        return str(blend_of(tmp_path / "blend.yaml", parts, epochs=1))
    if kind == "remote":
        store: ObjectStore = request.getfixturevalue("object_store")
        bucket: str = request.getfixturevalue("bucket")
        store.put_folder(folder, f"{bucket}/packs")
        return f"{bucket}/packs"
    return str(folder)


@contextmanager
def running(
    config: DataConfig, encoder: Any, ranks: int, state: Any
) -> Iterator[tuple[list[ScheduledLoader], Iterator[list[str]]]]:
    """The loaders of all ranks, and the packs of each step."""
    loaders = [build_loader(config, encoder, rank=rank, num_ranks=ranks) for rank in range(ranks)]

    def steps() -> Iterator[list[str]]:
        endless = [itertools.chain.from_iterable(itertools.repeat(one)) for one in loaders]
        for rows in zip(*endless, strict=True):
            yield [key for row in rows for key in row.__key__]

    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    yield loaders, steps()
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize(
    ("kind", "order"),
    [("tars", "written"), ("tars", "balanced"), ("remote", "written"), ("blend", "written")],
)
def test_each_pack_comes_once_per_epoch(kind: str, order: str, packed: str) -> None:
    rng = np.random.default_rng([len(kind), len(order)])
    folder = PackedFolder(packed)
    encoder = build_task_encoder(DataConfig(path=packed), read_packed_data(packed))
    total, state, seen = len(folder), None, list[str]()
    for leg in range(4):
        ranks = int(rng.choice([1, 2, 4]))
        count = int(rng.integers(1, 2 + total // ranks))
        config = DataConfig(path=packed, order=order, num_workers=2 * (leg == 2))
        with running(config, encoder, ranks, state) as (loaders, steps):
            seen += itertools.chain(*itertools.islice(steps, count))
            states = [loader.state_dict() for loader in loaders]
            collections.deque(itertools.islice(steps, leg), maxlen=0)  # until it is killed
        state = states[0]
        assert all(one == state for one in states)
    config = DataConfig(path=packed, order=order, num_workers=0)
    if order == "balanced":  # fewer than three packs come twice
        with running(config, encoder, 3, None) as (loaders, _):
            keys = [key for loader in loaders for row in loader for key in row.__key__]
        assert len(set(keys)) == total
        assert len(keys) - total == -total % 3
        return
    with running(config, encoder, 1, state) as (_, steps):
        for step in itertools.islice(steps, 3 * total):  # to the end of an epoch
            seen += step
            counts = collections.Counter(seen)
            if len(counts) == total and len(set(counts.values())) == 1 < counts[seen[0]]:
                return
    raise AssertionError(f"packs do not come equally often: {counts}")


@pytest.mark.parametrize("order", ["balanced", "written"])
def test_the_seed_of_a_run_decides_its_order(order: str, folder: Path, tmp_path: Path) -> None:
    """But for packs in the order written."""
    orders = []
    for seed in (0, 0, 7):
        sections: dict[str, Any] = {
            "model": WHOLE_VOCABULARY,
            "data": {"order": order, "repeat": False},
            "train": {"seed": seed},
        }
        config = make_config(folder, tmp_path, **sections)
        trainer, _ = build_trainer(config, initialize_parallel())
        orders.append([row.__key__ for row in iter(trainer.stages[0].train.next, None)])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(orders[2])
    assert (orders[0] == orders[2]) == (order == "written")
