"""Steps of one kind, in trainers whose ranks take packs in turn."""

import logging

import numpy as np
import pytest

from launch.trainers.shared import warn_of_mixed_steps
from task_encoders.loading.schedule import dealt_in_rows
from task_encoders.packs.manifest import PackColumns


class Packs:
    """Stands for a folder of packs."""

    path = "out/packed"

    def __init__(self, media: list[int], uniform_ranks: int) -> None:
        self.media, self.uniform_ranks = np.array(media, np.uint8), uniform_ranks

    def __len__(self) -> int:
        return len(self.media)

    def columns(self) -> PackColumns:
        return PackColumns(self.media, np.ones(len(self)), np.ones(len(self)))


@pytest.mark.parametrize(
    ("media", "uniform", "ranks", "size", "said"),
    [
        ([1, 0, 1, 0], 0, 2, 1, "pack with pack.order={num_ranks: 2, uniform: true}"),
        ([1, 1, 1, 0, 0, 0], 3, 2, 1, "pack with pack.order={num_ranks: 2, uniform: true}"),
        ([1, 1, 0, 0, 1, 1], 2, 2, 2, "let a rank take 1 at a time"),
        ([1, 1, 0, 0], 2, 2, 2, ""),
        ([1, 1, 1, 1, 0, 0, 0, 0], 4, 2, 1, ""),
        ([1, 1, 1], 0, 2, 1, ""),
        ([1, 0, 1], 0, 1, 1, ""),
    ],
)
def test_mixed_steps_are_warned_of(
    media: list[int],
    uniform: int,
    ranks: int,
    size: int,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_mixed_steps(Packs(media, uniform), ranks, size)
        warn_of_mixed_steps([1, 2, 3], ranks, size)  # nothing is known of their media
    assert len(caplog.messages) == bool(said)
    assert said in caplog.text


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_several_packs_are_of_one_kind(size: int) -> None:
    """Rows are dealt to the ranks in turn, as accelerate does."""
    ranks = 2
    media = np.repeat(np.random.default_rng(0).integers(0, 2, 12 // ranks), ranks)
    numbers = dealt_in_rows(len(media), ranks, size)
    assert sorted(numbers) == list(range(12))
    rows = media[numbers].reshape(-1, ranks, size).max(axis=2)
    assert (rows == rows[:, :1]).all()
    assert dealt_in_rows(5, 2, 2).tolist() == [0, 2, 1, 3, 4]
