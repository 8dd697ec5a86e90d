"""Every law runs over every scenario, which is packed once."""

from dataclasses import replace
from pathlib import Path

import pytest

from offline_packing.runs.run import Run
from tests.laws.kills import Moment, Mortal, make
from tests.scenarios import SCENARIOS, Scenario
from tests.world import World


@pytest.fixture(params=SCENARIOS)
def name(request: pytest.FixtureRequest) -> str:
    """A name in SCENARIOS; a law that holds for some is parametrized with their names."""
    return str(request.param)


@pytest.fixture
def scenario(name: str) -> Scenario:
    return SCENARIOS[name]


@pytest.fixture
def finished(name: str, scenario: Scenario, world: World) -> tuple[Run, list[Moment]]:
    """The scenario's local output, packed and verified in one go, and its moments."""

    def pack(folder: Path) -> list[Moment]:
        engine = Mortal()
        make(replace(scenario.run(world, folder), engine=engine))
        return engine.moments

    folder, moments = world.made(f"scenarios/{name}", pack)
    return scenario.run(world, folder), [tuple(moment) for moment in moments]


@pytest.fixture
def whole(finished: tuple[Run, list[Moment]]) -> Run:
    """The same run, to be read only."""
    return finished[0]


@pytest.fixture
def place(scenario: Scenario, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A new folder or URL, in the storage of the scenario."""
    if scenario.storage == "s3":
        return f"{request.getfixturevalue('bucket')}/out"
    return f"memory://{tmp_path}/out" if scenario.storage == "memory" else f"{tmp_path}/out"
