"""States of training runs that `source.skip: {trained: RUN}` reads: somebody else's, damaged, or of
another version."""

import copy
import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from offline_packing.errors import StageError
from offline_packing.online.ranks.pack_costs import schedule_of
from offline_packing.plan.trained import count_trained
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.runs.training_run import read_trained
from offline_packing.storage.files import seal, to_json
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.schedule import RankSampler
from tests.helpers.datasets import make_run
from tests.world import World


@pytest.fixture(scope="module")
def packed(world: World) -> Run:
    return world.run("bmr", pack={"seq_length": 256})


@pytest.fixture(scope="module", params=["written", "balanced"])
def state(packed: Run, request: pytest.FixtureRequest) -> dict[str, Any]:
    """State of a run whose two ranks trained an epoch and two steps of the next."""
    root = packed.workspace.root
    options = {"order": request.param, "seed": 0, "repeat": True}
    schedule = schedule_of(PackedFolder(root), num_ranks=2, packs_per_row=1, **options)
    sampler = RankSampler(schedule, 0)
    sampler.load_state_dict({**sampler.state_dict(), "step": 1})
    list(sampler)
    loader = {**sampler.state_dict(), "step": 2}
    manifest = require_manifest(root)
    datasets = {str(root): manifest.content_hash}
    stage = {"path": str(root), "micro_batch_size": 1, "datasets": datasets, "loader": loader}
    packs = [{"path": str(root), "content_hash": manifest.content_hash}]
    return {
        "version": 8,
        "run": {"train.seed": 0, "data.packs": packs, "packs_per_step": [2]},
        "iteration": 9,
        "begins": [0],
        "trained": [{**stage, **options}],
        "files": {"rank_00000.pt": "0" * 32},
        "data_parallel": 2,
        "context_parallel": 1,
    }


def write_state(run: Path, content: Any, iteration: int = 2) -> Path:
    path = run / "checkpoints" / f"iter_{iteration:08d}" / "state.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else to_json(content))
    return path


def counted(packed: Run, trained: Path) -> int:
    """Samples that a plan with `skip: {trained: …}` finds trained by a run."""
    source = packed.config.source[0].model_dump() | {"skip": [{"trained": str(trained)}]}
    run = make_run(source, packed.workspace.root, pack={"seq_length": 256})
    return int((count_trained(run.config, open_index(packed), run.trained) > 0).sum())


def put(content: dict[str, Any], place: str, value: Any) -> None:
    """Change the field at a dotted place; None removes it."""
    *names, last = [int(name) if name.isdigit() else name for name in place.split(".")]
    inside: Any = functools.reduce(lambda held, name: held[name], names, content)
    if value is None:
        del inside[last]
    else:
        inside[last] = value


LOADER = "trained.0.loader"
NESTED = functools.reduce(lambda inside, _: [inside], range(300), [])

#: Changes of a state, and part of the error, which names the field.
HOSTILE: list[tuple[str, Any, str]] = [
    ("version", 99, "has version 99, and 8 is read here"),
    ("version", None, "version"),
    ("run", [], "run"),
    ("run", {}, "data.packs"),
    ("run", {"data.packs": [], "packs_per_step": [], "deep": NESTED}, "deep"),
    ("iteration", -1, "iteration"),
    ("iteration", 2**63, "iteration"),
    ("begins", [], "begins"),
    ("begins", [5, 3], "begins"),
    ("begins", [0, 5], "begins"),
    ("files", {}, "files"),
    ("files", {"../rank_00000.pt": "0"}, "files"),
    ("files", {"/etc/passwd": "0"}, "files"),
    ("data_parallel", 0, "data_parallel"),
    ("trained", [], "names packs"),
    ("trained", None, "names packs"),
    ("trained.0.path", 5, "path"),
    ("trained.0.path", "/nowhere", "/nowhere"),
    ("trained.0.datasets", {}, "datasets"),
    ("trained.0.datasets", {"/nowhere": "0"}, "missing or were packed again"),
    ("trained.0.order", "random", "order"),
    ("trained.0.seed", -1, "seed"),
    ("trained.0.micro_batch_size", 0, "micro_batch_size"),
    (LOADER, None, "loader"),
    (f"{LOADER}.step", -5, "step"),
    (f"{LOADER}.step", 2**62, "steps"),
    (f"{LOADER}.epoch", -1, "epoch"),
    (f"{LOADER}.epoch", 2, "epoch"),
    (f"{LOADER}.num_ranks", 0, "num_ranks"),
    (f"{LOADER}.num_ranks", 2**62, "ranks"),
    (f"{LOADER}.num_ranks", 20_000_000, "ranks"),
    (f"{LOADER}.digest", "0" * 16, "written anew"),
    (f"{LOADER}.earlier", [[1]], "earlier"),
    (f"{LOADER}.earlier", [[2**62, 0]], "earlier"),
    (f"{LOADER}.earlier", [[2, 10**9]], "steps"),
    (f"{LOADER}.past", [[[2, -1]]], "past"),
    (f"{LOADER}.past", [[[2, 10**9]]], "steps"),
    (f"{LOADER}.past", [NESTED], "past"),
    (f"{LOADER}.past", [[[1 << 20, 0]] * 5], "too many"),
]


@pytest.mark.parametrize("state", ["written"], indirect=True)
@pytest.mark.parametrize(("place", "value", "named"), HOSTILE, ids=lambda one: repr(one)[:40])
def test_a_state_is_checked_before_it_is_used(
    place: str, value: Any, named: str, packed: Run, state: dict[str, Any], tmp_path: Path
) -> None:
    content = copy.deepcopy(state)
    put(content, place, value)
    write_state(tmp_path / "run", json.dumps(content).encode())
    started = time.process_time()
    with pytest.raises(StageError) as refused:
        counted(packed, tmp_path / "run")
    assert time.process_time() - started < 10
    text = str(refused.value)
    assert named in text
    assert str(tmp_path / "run") in text
    assert "\n" not in text
    assert "verify --discard" not in text


def test_an_honest_state_is_counted(packed: Run, state: dict[str, Any], tmp_path: Path) -> None:
    write_state(tmp_path / "run", seal(state))
    assert counted(packed, tmp_path / "run") == 30
    few = copy.deepcopy(state)
    few["trained"][0]["loader"] |= {"epoch": 0, "past": [], "step": 1}
    write_state(tmp_path / "few", few)
    assert 0 < counted(packed, tmp_path / "few") < 30


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (b"", "state.json is damaged"),
        (b'{"version": 8}', "run"),
        (b"[" * 100_000, "state.json is damaged"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b', "xxh3_128_of_this": "0"}', "is damaged"),
        (None, "Is a directory"),
    ],
)
def test_an_earlier_checkpoint_is_read_for_a_damaged_one(
    damaged: bytes | None,
    why: str,
    state: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_state(tmp_path, seal(state))
    newest = write_state(tmp_path, damaged or b"", iteration=4)
    if damaged is None:
        newest.unlink()
        newest.mkdir()
    (tmp_path / "checkpoints" / "iter_00000006.tmp").mkdir()
    (tmp_path / "checkpoints" / "iter_last").mkdir()
    assert read_trained(str(tmp_path)) == state["trained"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{newest.parent} is damaged" in line
    assert why in line
    assert "an earlier checkpoint is read" in line
    assert "verify" not in line


def test_damaged_checkpoints_alone_are_named(tmp_path: Path) -> None:
    for iteration in (2, 4):
        write_state(tmp_path, b"{}", iteration)
    with pytest.raises(
        StageError, match=r"no whole checkpoint: iter_00000004 \(.*iter_00000002 \("
    ):
        read_trained(str(tmp_path))
