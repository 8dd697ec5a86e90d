"""Engines: that of a configuration, and the progress that tasks tell."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offline_packing.engines import ENGINES
from offline_packing.engines.local import Advance, LocalEngine
from offline_packing.errors import StageError
from offline_packing.runs.run import build_engine
from offline_packing.verify.verify import verify
from tests.helpers.datasets import captioning_pairs, make_config, make_run, pack_all
from tests.helpers.slow_tasks import check_progress


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_engine_of_a_config(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKING_RANK", "0")
    monkeypatch.setenv("PACKING_WORLD_SIZE", "1")
    config = make_config(tmp_path / "data", tmp_path / "out", engine={"name": name})
    with build_engine(config) as engine:
        assert isinstance(engine, ENGINES[name])
        assert engine.workers == 0


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        ENGINES["ray"](1) as engine,
        pytest.raises(
            StageError, match=r"pip install 'ray>=2.55' \(in a clone: pip install -e '\.\[ray\]'\)"
        ),
    ):
        next(engine.run(abs, [-1]))


def test_progress_is_told_before_the_task_ends(tmp_path: Path) -> None:
    with LocalEngine(1) as engine:
        check_progress(engine, tmp_path)


class Recorded(LocalEngine):
    """Remembers what the stages' bars were told."""

    def __init__(self) -> None:
        super().__init__(0)
        self.told: list[int] = []

    def run(self, function: Any, tasks: Iterable[Any], listener: Advance | None = None) -> Any:
        return super().run(function, tasks, listener and self.told.append)


def test_stages_advance_by_records_and_packs(tmp_path: Path) -> None:
    """One part and one shard, so nothing could be told between tasks."""
    source = captioning_pairs(tmp_path / "data", 12)
    sections = {"output": {"packs_per_shard": 1000}, "pack": {"seq_length": 128}}
    run = replace(make_run(source, tmp_path / "out", **sections), engine=Recorded())
    assert isinstance(run.engine, Recorded)
    manifest = pack_all(run)
    (packs,) = manifest.counts.packs.values()
    assert len(manifest.shards) == 1 < packs
    assert run.engine.told == [1] * (12 + packs)
    run.engine.told.clear()
    assert verify(run).ok
    assert run.engine.told == [1] * packs
