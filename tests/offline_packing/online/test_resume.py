"""Resuming with torchdata's StatefulDataLoader: the same packs, whatever the loader and the
ranks."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import distributed
from torchdata.stateful_dataloader import StatefulDataLoader

from offline_packing.errors import StageError
from offline_packing.online.datasets import (
    ConstantLengthDataset,
    DynamicBatches,
    PackedIterableDataset,
)
from tests.helpers.online_samples import Indexed, SavableStream, Stream, numbered, numbers
from tests.helpers.rank_processes import run_ranks

LENGTHS = np.random.default_rng(3).integers(1, 50, 100)
LENGTHS[::40] = 99  # set aside: three of them


def packed(kind: Any = Indexed, **options: Any) -> PackedIterableDataset:
    defaults = {"seq_length": 64, "buffer_size": 7}
    return PackedIterableDataset(kind(numbered(LENGTHS)), **{**defaults, **options})


def dynamic(kind: Any = Indexed, **options: Any) -> DynamicBatches:
    defaults = {"max_seq_len": 64, "buffer_size": 7, "collate": list}
    return DynamicBatches(kind(numbered(LENGTHS)), **{**defaults, **options})


def constant_length(kind: Any = Indexed, **options: Any) -> ConstantLengthDataset:
    return ConstantLengthDataset(kind(numbered(LENGTHS)), seq_length=64, buffer_size=7, **options)


def loader_of(dataset: Any, num_workers: int = 0) -> Any:
    return StatefulDataLoader(dataset, batch_size=None, num_workers=num_workers)


def saves(loader: Any, every: int) -> tuple[list[list[int]], dict[int, bytes]]:
    """All packs, and states by how many of them had been taken."""
    states = {0: pickle.dumps(loader.state_dict())}
    found = []
    for count, pack in enumerate(loader, start=1):
        found.append([sample["number"] for sample in pack])
        if count % every == 0:
            states[count] = pickle.dumps(loader.state_dict())
    return found, states


MAKERS = {
    "binpack": lambda kind, **o: packed(kind, **o),
    "sequential": lambda kind, **o: packed(kind, strategy="sequential", **o),
    "emit": lambda kind, **o: packed(kind, leftovers="emit", **o),
    "auto": lambda kind, **o: packed(kind, strategy="auto", **o),
    "lengths": lambda kind, **o: packed(kind, strategy="auto", lengths=LENGTHS, **o),
    "constant": lambda kind, **o: constant_length(kind, **o),
    "dynamic": lambda kind, **o: dynamic(kind, **o),
    "fixed": lambda kind, **o: dynamic(kind, dyn_bsz=False, micro_batch_size=3, **o),
}


@pytest.mark.parametrize(
    ("maker", "kind"),
    [
        *((maker, Indexed) for maker in MAKERS),
        *((maker, kind) for maker in ("auto", "dynamic") for kind in (Stream, SavableStream)),
    ],
)
def test_the_tail_is_the_same_after_a_save_at_every_batch(maker, kind) -> None:
    make = MAKERS[maker]
    expected, states = saves(loader_of(make(kind)), every=1)
    assert len(states) == len(expected) + 1 > 30
    for count, state in states.items():
        loader = loader_of(make(kind))
        loader.load_state_dict(pickle.loads(state))
        assert numbers(loader) == expected[count:]
        assert loader.dataset.set_aside == {"overlong": 3}
        assert numbers(loader) == expected  # the next epoch


@pytest.mark.parametrize(
    ("maker", "num_workers", "world_size"),
    [
        ("auto", 1, 1),
        ("constant", 2, 1),
        ("dynamic", 0, 2),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                *[("auto", 4, 1), ("auto", 0, 2), ("auto", 1, 2), ("auto", 4, 2)],
                *[("dynamic", 1, 1), ("dynamic", 4, 2)],
            )
        ),
    ],
)
def test_workers_and_ranks_resume_exactly(maker, num_workers, world_size) -> None:
    found = []
    set_aside = 0
    for rank in range(world_size):
        ranks = {"rank": rank, "world_size": world_size}
        loader = loader_of(MAKERS[maker](Indexed, **ranks), num_workers)
        expected, states = saves(loader, every=9)
        found += expected
        assert len(states) >= 3
        for count, state in states.items():
            resumed = loader_of(MAKERS[maker](Indexed, **ranks), num_workers)
            resumed.load_state_dict(pickle.loads(state))
            assert numbers(resumed) == expected[count:]
        set_aside += resumed.dataset.set_aside["overlong"]
    assert set_aside == 3
    usable = np.flatnonzero(LENGTHS <= 64).tolist()
    assert sorted(number for pack in found for number in pack) == usable


def test_samples_of_known_length_are_not_read_again() -> None:
    iterator = iter(dataset := packed(lengths=LENGTHS))
    for _ in range(9):
        next(iterator)
    resumed = packed(lengths=LENGTHS)
    resumed.load_state_dict(dataset.state_dict())
    again = iter(resumed)
    assert resumed.dataset.asked == []
    assert numbers(again) == numbers(iterator)


def test_states_hold_no_samples() -> None:
    content = {"length": 10, "pixels": np.zeros(1_000_000, np.uint8)}
    loader = loader_of(PackedIterableDataset([content] * 50, seq_length=64, buffer_size=20))
    iterator = iter(loader)
    next(iterator)
    assert len(pickle.dumps(loader.state_dict())) < 5_000


def test_other_settings_readers_and_samples_are_refused() -> None:
    iterator = iter(dataset := packed())
    next(iterator)
    state = dataset.state_dict()
    for options, message in (
        ({"buffer_size": 8}, "the saved state is of buffer_size 7, and now it is 8"),
        ({"strategy": "auto"}, "of strategy 'binpack', and now it is 'auto'"),
        ({"shuffle": True}, "of shuffle False, and now it is True"),
        ({"rank": 0, "world_size": 2}, "of world_size 1, and now it is 2"),
    ):
        other = packed(**options)
        other.load_state_dict(state)
        with pytest.raises(StageError, match=message):
            iter(other)
    changed = PackedIterableDataset(numbered(LENGTHS // 2 + 1), seq_length=64, buffer_size=7)
    changed.load_state_dict(state)
    with pytest.raises(StageError, match=r"sample \d+ has \d+ tokens, and had \d+ before"):
        iter(changed)
    shorter = PackedIterableDataset(Stream(numbered(LENGTHS[:2])), seq_length=64, buffer_size=7)
    shorter.load_state_dict(state | {"source": {"position": 7, "mark": [0, None]}})
    with pytest.raises(StageError, match="ended after 2 samples, and had 7"):
        iter(shorter)


def rank_numbers() -> tuple[int, list[list[int]], bytes]:
    return distributed.get_rank(), numbers(packed()), pickle.dumps(packed())


def test_ranks_are_those_of_torch_distributed(tmp_path: Path) -> None:
    """Also in a spawned worker, which gets the dataset pickled and is in no process group."""
    for rank, found, pickled in run_ranks(2, tmp_path, rank_numbers):
        assert found == numbers(packed(rank=rank, world_size=2))
        assert numbers(pickle.loads(pickled)) == found


def test_states_are_plain() -> None:
    """As torch.load reads them without running code."""
    for maker in MAKERS.values():
        iterator = iter(dataset := maker(Indexed))
        next(iterator)
        _assert_plain(dataset.state_dict())


def _assert_plain(value: Any) -> None:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            _assert_plain(one)
    else:
        assert value is None or isinstance(value, bool | int | float | str | np.ndarray), value
