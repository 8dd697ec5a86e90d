"""A producer thread: bounded, in order, stopped whenever its reader is, its error the reader's."""

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from offline_packing.online.datasets import PackedIterableDataset
from offline_packing.online.pools import PackingPool
from offline_packing.online.prefetch import Prefetched
from tests.helpers.online_samples import numbered


class Counting(IterableDataset[int]):
    """0, 1, ... ; `made` is the last one made."""

    def __init__(self, end: int, fails_at: int | None = None) -> None:
        self.end = end
        self.fails_at = fails_at
        self.made = self.begin = 0

    def __iter__(self) -> Iterator[int]:
        begin, self.begin = self.begin, 0
        info = get_worker_info()
        for number in range(
            begin + (info.id if info else 0), self.end, info.num_workers if info else 1
        ):
            if number == self.fails_at:
                raise OSError("the disk is gone")
            self.made = number
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.made + 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["next"]


def producers() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    end = time.monotonic() + 60
    while producers() and time.monotonic() < end:
        time.sleep(0.01)
    assert producers() == 0


def test_the_producer_is_no_further_ahead_than_the_queue_is_long() -> None:
    source = Counting(1000)
    items = iter(Prefetched(source, queue_size=5))
    for _ in range(10):
        taken = next(items)
        time.sleep(0.005)
        assert source.made <= taken + 6
    assert producers() == 1


def test_a_reader_that_stops_midway_leaves_no_thread() -> None:
    for item in Prefetched(Counting(10**9), queue_size=2):
        if item == 20:
            break
    items = iter(Prefetched(Counting(10**9)))
    next(items)
    items.close()  # type: ignore[attr-defined]

    def train() -> None:
        for item in Prefetched(Counting(10**9)):
            raise RuntimeError(f"the trainer fails at {item}")

    with pytest.raises(RuntimeError, match="fails at 0"):
        train()


def test_an_error_of_the_dataset_is_raised_behind_the_items_before_it() -> None:
    items = iter(Prefetched(Counting(10, fails_at=4)))
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)
    assert list(items) == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_without_a_state_or_epochs(num_workers: int) -> None:
    """It is read again up to the last item taken."""

    def make() -> Any:
        plain = torch.utils.data.ChainDataset([Counting(20)])
        assert not hasattr(plain, "state_dict")
        return StatefulDataLoader(Prefetched(plain), batch_size=None, num_workers=num_workers)

    loader = make()
    loader.dataset.set_epoch(1)
    items = iter(loader)
    assert [next(items) for _ in range(7)] == list(range(7))
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == list(range(7, 20))
    assert list(resumed) == list(range(20))


@pytest.mark.parametrize("strategy", ["auto", "knapsack"])
def test_the_producer_makes_a_state_for_a_window_not_for_a_pack(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is O(samples that wait)."""
    made, state = [], PackingPool.state
    monkeypatch.setattr(PackingPool, "state", lambda pool: made.append(1) or state(pool))
    samples = numbered([30] * 2000)
    packs = PackedIterableDataset(samples, seq_length=64, buffer_size=500, strategy=strategy)
    assert sum(1 for _ in Prefetched(packs)) == 1000
    assert 0 < len(made) <= 2000 / 500 + 2
