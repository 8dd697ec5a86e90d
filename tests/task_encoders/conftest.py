"""What tests of all families share."""

from pathlib import Path

import pytest

from task_encoders.families import FAMILIES
from tests.helpers.tiny_families import needs_family
from tests.world import World


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, world: World) -> Path:
    """The small tokenizer of each family, in a folder of the family's name."""
    needs_family(request.param)
    return world.tokenizer(request.param)
