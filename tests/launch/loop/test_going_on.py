"""source.skip: {trained: RUN}: a run goes on with samples that are left, in another mixture
and length, and `plan --output` says how often each sample was trained."""

import collections
import signal
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from launch.config import LaunchConfig
from launch.loop.trainer import Trainer
from offline_packing.cli.commands import cli
from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import make_plan
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.datasets import config_file, make_run, mixed_pairs, pack_all
from tests.helpers.outputs import set_aside_in_plan
from tests.helpers.packed_runs import KilledError, make_config, make_trainer, step_lines
from tests.helpers.rank_processes import run_ranks
from tests.helpers.transformers_runs import Interrupted

pytestmark = pytest.mark.usefixtures("bmr_environment")

NAMES = ("short", "long")


def index_of(root: Path) -> Path:
    """An index of two sources."""
    sources = [
        {"format": "pairs", "path": str(mixed_pairs(root / name, 90, seed)), "task": "bmr"}
        for seed, name in enumerate(NAMES)
    ]
    named = [{**one, "name": name} for one, name in zip(sources, NAMES, strict=True)]
    measure(make_run(named, root / "all"))
    return root / "all"


def stage(index: Path, output: Path, seq_length: int, *, skip: Any = (), **pack: Any) -> Run:
    sources = [
        {"format": "index", "path": str(index), "name": name, "skip": skip} for name in NAMES
    ]
    return make_run(sources, output, pack={"seq_length": seq_length, **pack})


def mixture(short: float, later: float) -> dict[str, Any]:
    lines = [{"short": one, "long": 1 - one} for one in (short, later)]
    return dict(zip(("start", "end"), lines, strict=True))


def run_of(packs: Path, output: Path) -> LaunchConfig:
    batch = {"global_batch_packs": 4, "global_batch_size": None}
    return make_config(
        packs, output, batch=batch, train={"iterations": None}, checkpoint={"every": 2}
    )


def leg(packs: Path, output: Path, stop_at: int, accept: tuple[str, ...] = ()) -> list[str]:
    """Go on to a step, as one rank of a group; keys of the packs that were trained."""
    trainer, seen, _ = make_trainer(run_of(packs, output), accept=accept)
    trainer.resume()
    act = partial(signal.raise_signal, signal.SIGTERM)
    stopping = Interrupted(stop_at - trainer.iteration, act, Trainer._step)
    trainer._step = stopping.__get__(trainer, Trainer)  # type: ignore[method-assign]
    trainer.run()
    assert trainer.iteration == stop_at
    return seen.keys


def samples_of(packs: Path, keys: list[str]) -> collections.Counter[str]:
    """How often samples stand in the packs, by keys without the number of a copy."""
    names = {pack.key: orjson.loads(pack.record)["meta"]["keys"] for pack in PackedFolder(packs)}
    return collections.Counter(name.partition("#")[0] for key in keys for name in names[key])


def trained_column(run: Run, folder: Path) -> dict[str, int]:
    """The column `trained` of `plan --output`, by sample."""
    table = folder / "samples.parquet"
    arguments = ["plan", str(config_file(folder / "pack.yaml", run.config))]
    result = CliRunner().invoke(cli, [*arguments, "--output", str(table)])
    assert result.exit_code == 0, result.output
    rows = pq.read_table(table, columns=["key", "trained"]).to_pylist()
    return {row["key"].partition("#")[0]: row["trained"] for row in rows}


def test_a_run_goes_on_with_another_mixture_and_length(tmp_path: Path) -> None:
    """10 steps; then, of what is left, other packs on 2 ranks, on 1, killed there, and on 2."""
    index, output = index_of(tmp_path), tmp_path / "run"
    first = stage(index, tmp_path / "a", 256, mixture=mixture(0.8, 0.4))
    pack_all(first)
    packs = tmp_path / "a"
    a_keys = leg(packs, output, 10)
    assert len(a_keys) == 40 < len(PackedFolder(packs))
    done = samples_of(packs, a_keys)

    skip = {"trained": str(output)}
    second = stage(index, tmp_path / "b", 512, skip=skip, mixture=mixture(0.3, 0.6))
    pack_all(second)
    assert verify(second, deep=True).ok
    left_out = [row["key"] for row in set_aside_in_plan(second) if row["reason"] == "trained"]
    assert sorted(left_out) == sorted(done)
    assert 0 < len(left_out) < open_index(second).info.num_samples
    counts = dict.fromkeys(open_index(second).table("key")["key"].to_pylist(), 0)
    assert trained_column(second, tmp_path) == counts | done

    packs, accept = tmp_path / "b", ("data.packs",)
    ranks = run_ranks(2, tmp_path / "two", leg, packs, output, 13, accept)
    b_keys = [key for own in ranks for key in own]
    # Killed at the second pack of step 15: step 14 was saved, and is not trained again.
    trainer, seen, _ = make_trainer(run_of(packs, output), fail_at=5)
    trainer.resume()
    with pytest.raises(KilledError):
        trainer.run()
    assert trainer.iteration == 14
    b_keys += seen.keys[:4]
    b_keys += leg(packs, output, 16)
    ranks = run_ranks(2, tmp_path / "again", leg, packs, output, 18)
    b_keys += [key for own in ranks for key in own]

    wanted = done + samples_of(packs, b_keys)
    found = trained_column(second, tmp_path)
    assert found == counts | wanted
    lines = step_lines(output)
    assert [line["iteration"] for line in lines] == list(range(1, 19))
    assert sum(found.values()) == sum(line["sub_samples"] for line in lines)
    # The plan keeps to what was trained when it was made; another output leaves out more.
    assert pack_all(second).counts.packed == verify(second).num_samples
    third = stage(index, tmp_path / "c", 512, skip=skip, mixture=mixture(0.5, 0.5))
    measure(third)
    aside = make_plan(third, open_index(third)).set_aside
    assert aside.reasons["trained"] == len(wanted) > len(done)


def test_what_names_no_packs_is_refused(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    skip = {"trained": str(tmp_path / "other")}
    run = stage(index, tmp_path / "b", 512, skip=skip)
    measure(run)
    with pytest.raises(StageError, match="has no checkpoint that names packs: only"):
        make_plan(run, open_index(run))
    # packs of another source
    other = {"format": "pairs", "path": str(mixed_pairs(tmp_path / "d", 12, 3)), "task": "bmr"}
    pack_all(make_run(other, tmp_path / "packed", pack={"seq_length": 256}))
    leg(tmp_path / "packed", tmp_path / "other", 1)
    again = stage(index, tmp_path / "e", 512, skip=skip)
    measure(again)
    with pytest.raises(StageError, match=r"no pack that .*other trained is of .*short"):
        make_plan(again, open_index(again))
    # packs that were written anew since
    own = {**other, "skip": [skip]}
    same = make_run(own, tmp_path / "f", pack={"seq_length": 256})
    pack_all(same)
    change = {"seq_length": 256, "seed": 1}
    pack_all(make_run(other, tmp_path / "packed", pack=change, output={"overwrite": True}))
    anew = make_run(own, tmp_path / "g", pack={"seq_length": 256})
    measure(anew)
    with pytest.raises(StageError, match="packed, which are gone or packed anew since"):
        make_plan(anew, open_index(anew))
