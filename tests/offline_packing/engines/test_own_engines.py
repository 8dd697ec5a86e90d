"""An engine of one's own is one class, and its name in ENGINES."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from offline_packing.engines import ENGINES, Engine
from offline_packing.runs.run import Run, build_engine
from offline_packing.verify.verify import verify
from tests.helpers.datasets import captioning_pairs, make_config, pack_all
from tests.helpers.outputs import shard_files


class ThreadEngine(Engine):
    """Threads of this process."""

    tasks_done = 0

    def run(
        self,
        function: Callable[[Any], Any],
        tasks: Iterable[Any],
        listener: Callable[[int], object] | None = None,
    ) -> Iterator[Any]:
        with ThreadPoolExecutor(self.workers) as pool:
            for result in pool.map(function, tasks):
                ThreadEngine.tasks_done += 1
                yield result


def test_an_engine_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "threads", ThreadEngine)
    source = captioning_pairs(tmp_path / "data")
    written = []
    for name, workers in (("local", 0), ("threads", 3)):
        engine = {"name": name, "workers": workers}
        config = make_config(source, tmp_path / name, engine=engine)
        with build_engine(config) as built:
            run = Run(config, built)
            pack_all(run)
            assert verify(run, deep=True).ok
        written.append(shard_files(run))
    assert ThreadEngine.tasks_done > 6  # parts of the index; shards, written and verified
    assert written[0] == written[1]
