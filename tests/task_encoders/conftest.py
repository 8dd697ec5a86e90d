"""What tests of all families share."""

from pathlib import Path

import pytest

from task_encoders.families import FAMILIES
from tests.world import World


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, world: World) -> Path:
    """Return the small tokenizer of each family, in a folder of the family's name."""
    return world.tokenizer(request.param)
