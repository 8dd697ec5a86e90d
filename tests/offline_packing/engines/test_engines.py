"""The interface of all engines, and the message where one cannot be used."""

import sys
from pathlib import Path

import pytest

from offline_packing.engines import ENGINES
from offline_packing.errors import StageError
from offline_packing.runs.run import build_engine
from tests.helpers.datasets import make_config


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
