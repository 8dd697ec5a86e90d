"""Runs that are killed and go on, on other ranks and loader processes, in every order of the packs:
each pack comes once per epoch, but for those that a schedule names twice.

A leg trains some steps, saves a state, trains on and is killed; the next goes on from the state.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.config import DataConfig
from launch.data.micro_batches import build_loader, build_task_encoder
from launch.data.packed_data import read_packed_data
from launch.data.slots import Share
from offline_packing.online.ranks.rank_schedule import RankSchedule
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.datasets import make_run, mixed_pairs, pack_all
from tests.helpers.object_store import ObjectStore
from tests.helpers.packed_runs import slots_folder

SEQ_LENGTH = 256
#: How the packs were written, and which orders read them.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], Sequence[str]]] = {
    "tars": ({}, {}, ("written", "balanced")),
    "equal_cost": ({"order": {"num_ranks": 4, "num_workers": 2}}, {}, ("written", "balanced")),
    "epochs": ({"epochs": 2}, {"layout": "references"}, ("written",)),
    "token_ids": ({}, {"layout": "indexed"}, ("written",)),
    "remote": ({}, {}, ("written",)),
    "slots": ({}, {}, ("written",)),
}
CASES = [(kind, order) for kind, (_, _, orders) in KINDS.items() for order in orders]
pytestmark = pytest.mark.usefixtures("bmr_environment")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("source")
    return {"format": "pairs", "path": str(mixed_pairs(root / "pairs", 60)), "task": "bmr"}


@pytest.fixture
def packed(
    kind: str,
    source: dict[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    if kind == "slots":
        monkeypatch.delenv("OFFLINE_PACKING_BMR")
        return str(slots_folder(tmp_path / "slots", 2))
    pack, output, _ = KINDS[kind]
    run = make_run(
        source,
        tmp_path / "packed",
        pack={"seq_length": SEQ_LENGTH, **pack},
        output={"packs_per_shard": 5, **output},
    )
    pack_all(run)
    if kind != "remote":
        return str(run.workspace.root)
    store: ObjectStore = request.getfixturevalue("object_store")
    bucket: str = request.getfixturevalue("bucket")
    store.put_folder(run.workspace.root, f"{bucket}/packs")
    return f"{bucket}/packs"


def read_leg(
    config: DataConfig, encoder: Any, ranks: int, steps: int, killed_after: int, state: Any
) -> tuple[list[str], Any]:
    """Packs that all ranks trained until they saved a state, and the state, the same of each."""
    keys, states = list[str](), []
    for rank in range(ranks):
        loader = build_loader(config, encoder, rank=rank, num_ranks=ranks)
        if state is not None:
            loader.load_state_dict(state)

        def rows(loader: Any = loader) -> Iterator[Any]:
            return itertools.chain.from_iterable(itertools.repeat(loader))

        own = rows()
        for row in itertools.islice(own, steps):
            batch = row.row if isinstance(row, Share) else row
            keys += batch.__key__ if batch is not None else []
        states.append(loader.state_dict())
        for _ in itertools.islice(own, killed_after):
            pass
        loader.close()
    assert all(one == states[0] for one in states)
    return keys, states[0]


@pytest.mark.parametrize(("kind", "order"), CASES)
def test_each_pack_comes_once_per_epoch(kind: str, order: str, packed: str) -> None:
    rng = np.random.default_rng([len(kind), len(order)])
    folder = PackedFolder(packed)
    config = DataConfig(path=packed, order=order, num_workers=0)
    encoder = build_task_encoder(config, read_packed_data(packed))
    total = len(folder)
    state, seen = None, list[str]()
    for leg in range(6):
        ranks = int(rng.choice([2, 4] if kind == "slots" else [1, 2, 4]))
        steps = int(rng.integers(1, 2 + total // ranks))
        workers = {"num_workers": 2 * (leg == 3)}
        own, state = read_leg(
            config.model_copy(update=workers), encoder, ranks, steps, leg % 3, state
        )
        seen += own
    assert state is not None
    if order == "balanced":
        check_repeats(config, encoder)
        return
    last = 2 if kind == "slots" else 1  # to the end of an epoch
    for _ in range(3 * total):
        counts = collections.Counter(seen)
        if (not state["earlier"] and state["step"] == 0) or len(set(counts.values())) == 1:
            break
        own, state = read_leg(config, encoder, last, 1, 0, state)
        seen += own
    of_epochs = collections.Counter(counts[pack.key] for pack in folder)
    assert len(counts) == total
    assert max(of_epochs) - min(of_epochs) <= (len(folder.epoch_sizes) > 1)
    assert max(of_epochs) >= 2


def check_repeats(config: DataConfig, encoder: Any) -> None:
    """The packs that the schedule of three ranks names, in turn; fewer than three come twice."""
    loaders = [build_loader(config, encoder, rank=rank, num_ranks=3) for rank in range(3)]
    keys = [key for loader in loaders for row in loader for key in row.__key__]
    schedule: Any = loaders[0]._sampler.schedule
    assert isinstance(schedule, RankSchedule)
    counts = collections.Counter(keys)
    assert len(counts) == len(PackedFolder(config.path))
    assert sum(counts.values()) - len(counts) == -len(counts) % 3
