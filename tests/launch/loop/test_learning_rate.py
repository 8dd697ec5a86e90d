"""The learning rate."""

import pytest

from launch.loop.plan import DECAYS, learning_rate


def rates(decay: str, warmup: int = 4, iterations: int = 20) -> list[float]:
    return [
        learning_rate(
            i,
            iterations=iterations,
            warmup_iterations=warmup,
            max_rate=1.0,
            min_rate=0.1,
            decay=decay,
        )
        for i in range(iterations)
    ]


@pytest.mark.parametrize("decay", DECAYS)
def test_rises_over_the_warmup_and_never_leaves_its_bounds(decay: str) -> None:
    values = rates(decay)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert max(values) == 1.0
    assert min(values[4:]) >= 0.1
    assert values[4:] == sorted(values[4:], reverse=True)


def test_no_warmup_starts_at_the_maximum() -> None:
    assert rates("cosine", warmup=0)[0] == 1.0


def test_decays_end_just_above_the_minimum() -> None:
    assert 0.1 < rates("linear")[-1] < 0.2
    assert 0.1 < rates("cosine")[-1] < 0.12
    assert set(rates("constant")[4:]) == {1.0}


def test_steps_beyond_the_last_stay_at_the_minimum() -> None:
    rate = learning_rate(
        99, iterations=20, warmup_iterations=0, max_rate=1.0, min_rate=0.1, decay="cosine"
    )
    assert rate == pytest.approx(0.1)
