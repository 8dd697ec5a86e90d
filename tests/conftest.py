"""What all tests have in common."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _frozen_objects_stay_frozen() -> Iterator[None]:
    """Energon's loaders collect garbage when they start, and thaw at their end what they froze. In
    a process that has imported torch and transformers that takes 0.2 s, three times a loader."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setattr(gc, "unfreeze", lambda: None)
        gc.collect()
        gc.freeze()
        yield
