"""Datasets that pack while reading: epochs, ranks, streams that divide themselves; and a producer
thread: bounded, in order, stopped whenever its reader is, its error the reader's."""

import gc
import logging
import pickle
import threading
import time
from collections.abc import Iterator
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from offline_packing.errors import StageError
from offline_packing.online.datasets import PackedIterableDataset
from offline_packing.online.online_dataset import _Pass
from offline_packing.online.pools import PackingPool
from offline_packing.online.prefetch import Prefetched
from offline_packing.online.reading import Reader
from tests.helpers.online_samples import Indexed, SavableStream, Stream, numbered, numbers

LENGTHS = np.random.default_rng(3).integers(1, 50, 41)


def packed(kind: Any = Indexed, lengths: Any = LENGTHS, **options: Any) -> PackedIterableDataset:
    defaults = {"seq_length": 64, "buffer_size": 7, "strategy": "auto"}
    return PackedIterableDataset(kind(numbered(lengths)), **{**defaults, **options})


def loader_of(dataset: Any, num_workers: int = 0) -> Any:
    return StatefulDataLoader(dataset, batch_size=None, num_workers=num_workers)


class Divided(IterableDataset[Any]):
    """Gives each worker its own part, as Hugging Face's streams do."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        yield from self._samples[info.id :: info.num_workers] if info else self._samples


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_sample_is_lost_of_a_stream_that_divides_itself(num_workers: int) -> None:
    """It would, and the readers would keep their own part of each part."""
    two = [{"rank": rank, "world_size": 2} for rank in range(2)]
    for readers in ([{"split": True}], [{"split": False}], two):
        found: list[int] = []
        for options in readers:
            found += chain(*numbers(loader_of(packed(Divided, **options), num_workers)))
        assert sorted(found) == list(range(len(LENGTHS)))


def test_a_worker_whose_own_part_is_empty_has_no_packs() -> None:
    loader = loader_of(packed(Divided, LENGTHS[:1], split=False), 2)
    assert numbers(loader) == [[0]]
    with pytest.raises(StageError, match="the dataset is empty"):
        list(packed(Divided, [], split=False))


@pytest.mark.parametrize(("num_workers", "prefetched"), [(0, False), (0, True), (1, True)])
def test_an_epoch_set_on_resuming_is_that_of_the_next_pass(
    num_workers: int, prefetched: bool
) -> None:
    """Loaders restore the dataset after the trainer has set the epoch."""

    def make() -> Any:
        dataset: Any = packed(shuffle=True)
        return loader_of(Prefetched(dataset) if prefetched else dataset, num_workers)

    loader = make()
    first = numbers(loader)
    state = pickle.dumps(loader.state_dict())  # at the end of epoch 0
    loader.dataset.set_epoch(1)
    second = numbers(loader)
    assert first != second
    resumed = make()
    resumed.load_state_dict(pickle.loads(state))
    resumed.dataset.set_epoch(1)
    assert numbers(resumed) == second


def test_ranks_that_may_end_unequally_are_told_before_the_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        next(iter(packed(rank=0, world_size=2)))
    (record,) = caplog.records
    assert "each of 2 ranks packs its own samples" in record.getMessage()
    caplog.clear()
    for rank, world_size, repeats in ((1, 2, False), (0, 1, False), (0, 2, True)):
        next(iter(packed(rank=rank, world_size=world_size, repeat=repeats)))
    assert not caplog.records


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("count", [7, 300])
def test_lengths_that_are_wrong_end_the_run(repeats: bool, count: int) -> None:
    """Those of a few samples may be."""
    real = np.resize(LENGTHS, count)

    def with_lengths(lengths: Any) -> PackedIterableDataset:
        options = {"seq_length": 64, "buffer_size": 7, "repeat": repeats}
        return PackedIterableDataset(numbered(real), lengths=lengths, **options)

    with pytest.raises(StageError, match="its length was given as"):
        next(iter(with_lengths(real + 1)))
    few = real.copy()
    few[1:4] += 1
    dataset = with_lengths(few)
    assert len(list(islice(dataset, 3))) == 3


def test_a_reader_without_a_usable_sample_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # it warns of each
    message = "no sample can be used, the last one because of overlong: 99 tokens"
    with pytest.raises(StageError, match=message):
        next(iter(PackedIterableDataset(repeat({"length": 99}), seq_length=64)))
    for reader in range(2):  # neither is the only one
        two = {"rank": reader, "world_size": 2}
        with pytest.raises(StageError, match=message):
            list(packed(Stream, [99] * 200, **two))
        assert list(packed(Stream, [99] * 20, **two)) == []
    with pytest.raises(StageError, match="worker 0 of rank 2 has no sample to repeat; set fewer"):
        next(iter(packed(Indexed, LENGTHS[:2], repeat=True, rank=2, world_size=3)))


def test_workers_of_many_ranks_count_for_themselves() -> None:
    """Whatever the number of ranks, no worker's state counts what another set aside."""
    dataset = packed(Indexed, [*LENGTHS, *[99] * 600])
    readers = [_Pass(dataset, Reader(5, 256, worker, 2), None) for worker in range(2)]
    for reader in readers:
        list(reader)
    assert [sum(reader.state()["set_aside"]) for reader in readers] == [1, 1]
    assert dataset.set_aside == {"overlong": 2}


class TrackedState(dict[str, int]):
    """A state whose live instances can be counted."""


class TrackedStream(SavableStream):
    def state_dict(self) -> dict[str, int]:
        return TrackedState(super().state_dict())


def test_states_of_a_stream_do_not_pile_up_where_nobody_saves() -> None:
    def make() -> PackedIterableDataset:
        return packed(TrackedStream, np.resize(LENGTHS, 5000))

    iterator = iter(dataset := make())
    taken = len(list(islice(iterator, 1500)))
    assert taken == 1500
    assert sum(isinstance(one, TrackedState) for one in gc.get_objects()) < 80
    resumed = make()
    resumed.load_state_dict(dataset.state_dict())
    assert numbers(resumed) == numbers(iterator)
    assert resumed.dataset.given < 5000


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
    source = SavableStream(range(1000))
    items = iter(Prefetched(source, queue_size=5))
    for _ in range(10):
        taken = next(items)
        time.sleep(0.005)
        assert source.given <= taken + 7
    assert producers() == 1


def test_a_reader_that_stops_midway_leaves_no_thread() -> None:
    """`_no_thread_is_left` asserts it."""
    for item in Prefetched(SavableStream(range(10**9)), queue_size=2):
        if item == 20:
            break
    items = iter(Prefetched(Stream(range(10**9))))
    next(items)
    items.close()  # type: ignore[attr-defined]


def test_an_error_of_the_dataset_is_raised_behind_the_items_before_it() -> None:
    def failing() -> Iterator[int]:
        yield from range(4)
        raise OSError("the disk is gone")

    items = iter(Prefetched(failing()))
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)
    assert list(items) == []


def test_a_dataset_without_a_state_or_epochs() -> None:
    """It is read again up to the last item taken."""
    loader, resumed = (loader_of(Prefetched(Stream(range(20)))) for _ in range(2))
    loader.dataset.set_epoch(1)
    items = iter(loader)
    assert [next(items) for _ in range(7)] == list(range(7))
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
