"""Stages: packs of several outputs trained one after another, stopped anywhere, extended, and left
for other packs; and `source.skip: {trained: RUN}`, with which a run goes on with samples that are
left."""

import collections
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from launch.config import LaunchConfig
from launch.data.packed_data import read_packed_data
from launch.loop.metrics import read_metrics
from offline_packing.cli.commands import cli
from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.online.ranks.pack_costs import schedule_of
from offline_packing.plan.plan import make_plan
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.storage.files import read_json
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.schedule import LoaderState, trained_items
from tests.helpers.datasets import (
    captioning_pairs,
    config_file,
    make_run,
    mixed_pairs,
    pack_all,
    packed_run,
)
from tests.helpers.outputs import set_aside_in_plan
from tests.helpers.packed_runs import (
    Trained,
    losses,
    make_config,
    make_trainer,
    step_lines,
    trained,
)
from tests.helpers.prepared_folders import blend_of
from tests.helpers.rank_processes import run_ranks

pytestmark = pytest.mark.usefixtures("bmr_environment")

#: Of the packs of each stage.
SEQ_LENGTHS = (192, 256, 512)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same dialogues in packs of several lengths, with other samples to validate on."""
    root = tmp_path_factory.mktemp("stages")
    source = {"format": "pairs", "path": str(mixed_pairs(root / "source", 24)), "task": "bmr"}
    for length in SEQ_LENGTHS:
        pack = {"seq_length": length, "seed": length}
        split = {"train": 0.7, "val": 0.3}
        pack_all(make_run(source, root / str(length), pack=pack, output={"split": split}))
    return [str(root / str(length)) for length in SEQ_LENGTHS]


def config_of(paths: Sequence[str], output: Path, /, **sections: Any) -> LaunchConfig:
    """A run whose steps take some samples; a checkpoint every second step."""
    data = sections.pop("data", {})
    defaults: dict[str, Any] = {
        "batch": {"global_batch_packs": None, "global_batch_size": 6},
        "schedule": {"decay": "constant", "warmup": 0},
        "train": {"iterations": None},
        "checkpoint": {"every": 2},
    }
    own = {"path": list(paths), "num_workers": 0, **data}
    return make_config(Path(paths[0]), output, data=own, **defaults | sections)


def state_of(output: Path) -> Any:
    return read_json(max((output / "checkpoints").glob("iter_*")) / "state.json")


def packs_of(state: Any) -> collections.Counter[str]:
    """How often each pack was trained, by the schedules of the stages that a checkpoint names."""
    found: collections.Counter[str] = collections.Counter()
    for entry in state["trained"]:
        folder, loader = PackedFolder(entry["path"]), LoaderState.model_validate(entry["loader"])
        content_hash = read_packed_data(entry["path"]).content_hash
        assert entry["datasets"] == {entry["path"]: content_hash}
        keys = [pack.key for pack in folder]

        def schedule(num_ranks: int, entry: Any = entry, folder: PackedFolder = folder) -> Any:
            given = {name: entry[name] for name in ("order", "seed", "repeat")}
            rows = entry["micro_batch_size"]
            return schedule_of(folder, num_ranks=num_ranks, packs_per_row=rows, **given)

        for items in trained_items(loader, schedule):
            found.update(keys[n] for n in items.tolist())
    return found


@pytest.fixture(scope="module")
def done(
    stages: list[str], bmr_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """A whole run."""
    output = tmp_path_factory.mktemp("whole")
    return trained(config_of(stages, output, validation={"every": 3}))


def test_each_stage_trains_and_validates_on_its_own_packs(stages: list[str], done: Trained) -> None:
    """In the order written; the packs of a stage's last step are completed from its first."""
    plan, output = done.trainer.plan, done.output
    assert len({(stage.packs_per_step, stage.steps()) for stage in plan.stages}) == 3
    assert plan.iterations == sum(stage.steps() for stage in plan.stages) > 6
    lines, keys = iter(step_lines(output)), list[str]()
    for stage, path in zip(plan.stages, stages, strict=True):
        packs = [pack.key for pack in PackedFolder(path)]
        assert stage.steps() == -(-len(packs) // stage.packs_per_step)
        own = itertools.cycle(packs)
        keys += itertools.islice(own, stage.steps() * stage.packs_per_step)
        for line in itertools.islice(lines, stage.steps()):
            room = stage.packs_per_step * read_packed_data(path).seq_length
            assert line["fill"] == line["tokens"] / room
    assert list(lines) == []
    assert done.keys == keys
    val = [read_packed_data(path).num_val_packs for path in stages]
    assert len(set(val)) > 1
    validated = {
        line["iteration"]: line["validation_packs"]
        for line in read_metrics(output / "metrics.jsonl")
        if "validation_packs" in line
    }
    for step, number in validated.items():
        assert number == next(val[n] for n in range(3) if step <= plan.bounds[n + 1])
    assert len(validated) == -(-plan.iterations // 3)
    state = state_of(output)
    assert [entry["path"] for entry in state["trained"]] == stages
    assert state["begins"] == list(plan.bounds[:-1])
    assert packs_of(state) == collections.Counter(done.keys)


def test_a_run_killed_between_stages_and_in_one_goes_on(
    stages: list[str], done: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As if nothing had happened, to the last bit; the first kill is between the last step of a
    stage and the next. Checkpoints are as far apart as the first stage is long."""
    bounds, (first, second, _) = done.trainer.plan.bounds, done.trainer.plan.stages
    every = bounds[1]
    config = config_of(stages, tmp_path, checkpoint={"every": every})
    trained(config, fail_at=every * first.packs_per_step + 1)
    state = state_of(tmp_path)
    assert (state["begins"], state["iteration"]) == ([0], every)
    trained(config, fail_at=every * second.packs_per_step + 1)
    with caplog.at_level(logging.INFO, "launch"):
        again = trained(config)
    assert bounds[1] < again.begun == 2 * every < bounds[2]
    assert losses(tmp_path) == losses(done.output)
    assert again.keys == done.keys[-len(again.keys) :]
    assert state_of(tmp_path)["trained"] == state_of(done.output)["trained"]
    assert f"stage 3, steps {bounds[2] + 1} to {bounds[3]}: {stages[2]}" in caplog.text


def test_a_list_is_extended(stages: list[str], done: Trained, tmp_path: Path) -> None:
    """A run of one path, too; stages that have not begun may change. With one rate, the losses are
    those of all stages at once."""
    a, b, c = stages
    once: dict[str, Any] = {"checkpoint": {"every": 0}}
    keys = trained(config_of([a], tmp_path, **once)).keys
    assert state_of(tmp_path)["begins"] == [0]
    trained(config_of([a, c, b], tmp_path, **once), fail_at=0)
    keys += trained(config_of([a, b], tmp_path, **once)).keys
    last = trained(config_of(stages, tmp_path, **once))
    assert keys + last.keys == done.keys
    assert last.trainer.plan == done.trainer.plan
    assert losses(tmp_path) == losses(done.output)
    assert state_of(tmp_path)["trained"] == state_of(done.output)["trained"]
    with pytest.raises(StageError, match=r"data\.packs was those of .*512.*, is those of"):
        make_trainer(config_of([a, b], tmp_path, **once))[0].resume()


def test_a_run_goes_on_with_other_packs(stages: list[str], tmp_path: Path) -> None:
    """If that is named: the stage that is trained ends where it is. Weights, moments and steps go
    on, and the loader's options may change with the packs."""
    a, b, c = stages
    once: dict[str, Any] = {"checkpoint": {"every": 0}}
    one = {"batch": {"global_batch_packs": 2}, "train": {"iterations": 3}, **once}
    begun = trained(config_of([a], tmp_path, **one))
    first, optimizer = begun.keys, begun.trainer.optimizer
    assert len(first) == 6 < len(PackedFolder(a))
    moments = {n: t.full_tensor().clone() for n, t in optimizer.state["exp_avg"].items()}
    data = {"order": "balanced", "micro_batch_size": 2}
    other = config_of([c, b], tmp_path, data=data, batch={"global_batch_packs": 4}, **once)
    with pytest.raises(StageError) as refused:
        make_trainer(other)[0].resume()
    text = str(refused.value)
    names = ["data.micro_batch_size", "data.order", "data.packs", "train.iterations"]
    assert all(f"--accept-mismatch {name}" in text for name in names)
    assert f"data.packs was those of {a} (" in text
    accept = [*names, "batch.global_batch_packs"]
    with pytest.raises(ValueError, match=r"train\.iterations=3 counts all steps, and 3 are done"):
        trained(config_of([c], tmp_path, **one), "data.packs")
    gone, seen, _ = make_trainer(other, accept=accept)
    gone.resume()
    state = gone.optimizer.state["exp_avg"]
    assert all((state[name].full_tensor() == was).all() for name, was in moments.items())
    assert gone.plan.bounds[0] == gone.iteration == 3
    steps = [-(-len(PackedFolder(path)) // 4) for path in (c, b)]
    assert gone.plan.iterations == 3 + sum(steps)
    assert gone.run()
    assert len(losses(tmp_path)) == 3 + sum(steps)
    found = state_of(tmp_path)
    assert [entry["path"] for entry in found["trained"]] == [a, c, b]
    assert [entry["order"] for entry in found["trained"]] == ["written", *["balanced"] * 2]
    assert found["trained"][0]["loader"]["step"] == 6
    assert found["begins"] == [3, 3 + steps[0]]
    assert packs_of(found) == collections.Counter([*first, *seen.keys])
    assert trained(other).keys == []  # it is this run by now
    iterations = 3 + sum(steps) + 4  # in all
    back = config_of([a], tmp_path, **one | {"train": {"iterations": iterations}})
    again = trained(back, *names, "batch.global_batch_packs")
    assert again.trainer.plan.iterations == iterations
    assert len(again.keys) == 2 * 4
    assert again.keys[:6] == first
    assert [entry["path"] for entry in state_of(tmp_path)["trained"]] == [a, c, b, a]


def test_a_stage_whose_packs_end_early_is_followed_by_the_next(
    stages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subset of a dataset, without repeating: fewer steps than its packs would take. The learning
    rate falls over all steps that are planned. One environment cannot name the tasks of
    all stages: that they are packs is enough."""
    monkeypatch.delenv("OFFLINE_PACKING_BMR")
    part = f"path: {stages[0]}, weight: 1, subset: {{range: ['0%', '50%']}}"
    half = blend_of(tmp_path / "half.yaml", [part])
    captions = tmp_path / "captions"
    packed_run(captioning_pairs(tmp_path / "source", 12), captions, pack={"seq_length": 256})
    paths = [str(half), str(captions), stages[2]]
    sizes = [len(PackedFolder(path)) for path in paths]
    sections = {"data": {"repeat": False}, "schedule": {"decay": "cosine"}}
    config = config_of(paths[:2], tmp_path / "run", **sections)
    trainer, seen, _ = make_trainer(config)
    planned = trainer.plan
    assert trainer.run()
    assert len(seen.keys) == sum(sizes[:2])
    state = state_of(tmp_path / "run")
    assert 0 < state["begins"][1] < planned.bounds[1]
    lines = step_lines(tmp_path / "run")
    assert len(lines) == state["iteration"] < planned.iterations
    for step, line in enumerate(lines):
        plan = planned if step < state["begins"][1] else trainer.plan
        assert line["learning_rate"] == plan.learning_rate(step, config.schedule)
    assert len(trained(config_of(paths, tmp_path / "run", **sections)).keys) == sizes[2]


def index_of(root: Path) -> Path:
    source = {"format": "pairs", "task": "bmr", "path": str(mixed_pairs(root / "source", 60))}
    measure(make_run(source, root / "all"))
    return root / "all"


def stage_of(index: Path, output: Path, seq_length: int, *, skip: Any = ()) -> Run:
    source = {"format": "index", "path": str(index), "skip": skip}
    return make_run(source, output, pack={"seq_length": seq_length})


def leg(packs: Path, output: Path, count: int, *accept: str) -> list[str]:
    """Go on as one rank of a group until it is killed after some packs, at the end of a step of
    four; return their keys."""
    batch = {"global_batch_packs": 4, "global_batch_size": None}
    config = config_of([str(packs)], output, batch=batch, checkpoint={"every": 1})
    return trained(config, *accept, fail_at=count).keys


def samples_of(packs: Path, keys: list[str]) -> collections.Counter[str]:
    """How often samples stand in the packs, by keys without the number of a copy."""
    names = {pack.key: pack.record["meta"]["keys"] for pack in PackedFolder(packs)}
    return collections.Counter(name.partition("#")[0] for key in keys for name in names[key])


def trained_column(run: Run, folder: Path) -> dict[str, int]:
    """The column `trained` of `plan --output`, by sample."""
    table = folder / "samples.parquet"
    arguments = ["plan", str(config_file(folder / "pack.yaml", run.config))]
    result = CliRunner().invoke(cli, [*arguments, "--output", str(table)])
    assert result.exit_code == 0, result.output
    rows = pq.read_table(table, columns=["key", "trained"]).to_pylist()
    return {row["key"].partition("#")[0]: row["trained"] for row in rows}


def test_a_run_goes_on_with_what_is_left_in_longer_packs(done: Trained, tmp_path: Path) -> None:
    """4 steps; then other packs, of what is left, on 2 ranks, and on 1."""
    index, output = index_of(tmp_path), tmp_path / "run"
    pack_all(stage_of(index, tmp_path / "a", 256))
    a_keys = leg(tmp_path / "a", output, 16)
    assert len(a_keys) == 16 < len(PackedFolder(tmp_path / "a"))
    used = samples_of(tmp_path / "a", a_keys)

    second = stage_of(index, tmp_path / "b", 512, skip={"trained": str(output)})
    pack_all(second)
    assert verify(second, deep=True).ok
    left_out = [row["key"] for row in set_aside_in_plan(second) if row["reason"] == "trained"]
    assert sorted(left_out) == sorted(used)
    counts = dict.fromkeys(open_index(second).table("key")["key"].to_pylist(), 0)
    assert 0 < len(left_out) < len(counts)
    assert trained_column(second, tmp_path) == counts | used

    ranks = run_ranks(2, tmp_path / "two", leg, tmp_path / "b", output, 2, "data.packs")
    b_keys = [key for own in ranks for key in own] + leg(tmp_path / "b", output, 4)
    assert len(b_keys) == 8
    wanted = used + samples_of(tmp_path / "b", b_keys)
    found = trained_column(second, tmp_path)
    assert found == counts | wanted
    assert sum(found.values()) == sum(line["sub_samples"] for line in step_lines(output))
    # The plan keeps to what was trained when it was made; another output leaves out more.
    assert pack_all(second).counts.packed == verify(second).num_samples
    third = stage_of(index, tmp_path / "c", 512, skip={"trained": str(output)})
    measure(third)
    aside = make_plan(third, open_index(third)).set_aside
    assert aside.reasons["trained"] == len(wanted) > len(used)
    other = stage_of(index, tmp_path / "d", 512, skip={"trained": str(done.output)})
    measure(other)
    with pytest.raises(StageError, match=rf"the run {done.output} trained no pack of"):
        make_plan(other, open_index(other))
