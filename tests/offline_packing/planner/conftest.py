"""Small plans of these tests run compiled kernels."""

from collections.abc import Iterator

import pytest

from offline_packing.planner.strategies import kernels


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    """Compile kernels as after many small plans: some take seconds in Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_planned", kernels._MOST_IN_ALL)
        yield
