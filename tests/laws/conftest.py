"""Every law runs over every scenario, which is packed once."""

from pathlib import Path

import pytest

from offline_packing.runs.run import Run
from tests.laws.kills import finished_run
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
def whole(name: str, world: World) -> Run:
    """Return the scenario's local output, to be read only."""
    return finished_run(world, name)[0]


@pytest.fixture
def place(scenario: Scenario, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A new folder or URL, in the storage of the scenario."""
    if scenario.storage == "s3":
        return f"{request.getfixturevalue('bucket')}/out"
    return f"memory://{tmp_path}/out" if scenario.storage == "memory" else f"{tmp_path}/out"
