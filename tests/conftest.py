"""Options and fixtures of all tests."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-data",
        metavar="DIR",
        default=str(Path(__file__).parents[1] / "docs/images"),
        help="images and videos that every family's encoder is held against transformers on",
    )


@pytest.fixture(scope="session", autouse=True)
def _frozen_objects_stay_frozen() -> Iterator[None]:
    """Energon's loaders collect garbage when they start, and thaw at their end what they froze. In
    a process that has imported torch and transformers that takes 0.2 s, three times a loader."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setattr(gc, "unfreeze", lambda: None)
        gc.collect()
        gc.freeze()
        yield
