"""Packing while training, saved and restored: every way to do it goes on with the same packs,
whatever the loader, its workers and the ranks."""

import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from launch.data.loader_state import load_state
from offline_packing.errors import StageError
from offline_packing.online.datasets import (
    ConstantLengthDataset,
    DynamicBatches,
    PackedIterableDataset,
)
from offline_packing.online.energon import OnlineTaskEncoder, get_online_train_dataset
from task_encoders.energon_samples import BATCH_TENSORS
from task_encoders.loading.packed_dataset import PackedLoader
from task_encoders.settings import PackingSettings
from tests.helpers import energon_batches
from tests.helpers.context_ranks import as_rank
from tests.helpers.faults import kill_worker
from tests.helpers.online_samples import Indexed, SavableStream, Stream, numbered, numbers
from tests.helpers.prepared_folders import crude_folder

LENGTHS = np.random.default_rng(3).integers(1, 50, 60)
LENGTHS[::40] = 99  # set aside: two of them
#: Packs that are taken of a dataset without end; the others have fewer.
MOST = 40


def make(form: Any, kind: Any = Indexed, samples: Any = LENGTHS, **options: Any) -> Any:
    return form(kind(numbered(samples)), **{"buffer_size": 7, **options})


packed = partial(make, PackedIterableDataset, seq_length=64)
auto = partial(packed, strategy="auto")
constant = partial(make, ConstantLengthDataset, seq_length=64, buffer_size=20, delta=1)
dynamic = partial(make, DynamicBatches, max_seq_len=64, collate=list)
DATASETS: dict[str, Callable[..., Any]] = {
    "binpack": packed,
    "sequential": partial(packed, strategy="sequential"),
    "emit": partial(packed, leftovers="emit"),
    "auto": auto,
    "auto stream": partial(auto, kind=Stream),
    "auto savable": partial(auto, kind=SavableStream),
    "lengths": partial(auto, lengths=LENGTHS),
    "constant": constant,
    "dynamic": dynamic,
    "dynamic stream": partial(dynamic, kind=Stream),
    "dynamic savable": partial(dynamic, kind=SavableStream),
    "fixed": partial(dynamic, dyn_bsz=False, micro_batch_size=3),
    "endless": partial(auto, shuffle=True, repeat=True),
    "endless stream": partial(auto, kind=Stream, repeat=True),
    "endless savable": partial(auto, kind=SavableStream, repeat=True),
}
#: Dialogues through Energon's loader.
ENERGON = ("Energon", "Energon endless")


class EnergonLoader:
    """Energon's loader with the calls of torchdata's. Its states go through files, as in a
    checkpoint."""

    def __init__(self, loader: PackedLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state_dict(self) -> bytes:
        torch.save(self.loader.save_state_rank(), file := io.BytesIO())
        return file.getvalue()

    def load_state_dict(self, state: bytes) -> None:
        self.loader.restore_state_rank(load_state(io.BytesIO(state)))


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crude_folder(tmp_path_factory.mktemp("crude") / "crude", len(LENGTHS))


@contextmanager
def loading(
    front: str, folder: Path, workers: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[Any]:
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if front in DATASETS:
        dataset = DATASETS[front](**ranks)
        yield StatefulDataLoader(dataset, batch_size=None, num_workers=workers)
        return
    encoder = OnlineTaskEncoder(seq_length=512, settings=PackingSettings(packed=False))
    options = {"dataset_of": get_online_train_dataset, "buffer": 16, "repeat": "endless" in front}
    with energon_batches.loading(folder, encoder, workers, **ranks, **options) as loader:
        yield EnergonLoader(loader)


def content(packs: Iterable[Any]) -> list[tuple[list[int], int]]:
    """Numbers of the samples of each pack; and of a row of tensors, its hash."""
    found = []
    for pack in islice(packs, MOST):
        if isinstance(pack, list):
            found.append(([sample["number"] for sample in pack], 0))
        else:
            tensors = [getattr(pack, name).numpy().tobytes() for name in BATCH_TENSORS]
            found.append(([*map(int, pack.sub_sample_keys)], hash(tuple(tensors))))
    return found


def saves(loader: Any, every: int) -> tuple[list[Any], dict[int, bytes]]:
    """The packs, and states by how many of them had been taken."""
    states = {0: pickle.dumps(loader.state_dict())}
    found: list[Any] = []
    for pack in islice(loader, MOST):
        found += content([pack])
        if len(found) % every == 0:
            states[len(found)] = pickle.dumps(loader.state_dict())
    return found, states


@pytest.mark.parametrize(
    ("front", "workers", "ranks", "every"),
    [
        *((front, 0, 1, 14 if "endless" in front else 6) for front in DATASETS),
        *[("Energon", 0, 1, 8), ("Energon endless", 0, 1, 19)],
        *[("constant", 2, 1, 13), ("dynamic", 0, 2, 5)],
        ("endless savable", 2, 2, 26),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                *[("auto", 4, 2, 9), ("endless", 2, 2, 26), ("endless stream", 2, 2, 26)],
                *[("Energon", 2, 1, 4), ("Energon endless", 1, 2, 19)],
            )
        ),
    ],
)
def test_a_restored_loader_gives_the_same_tail(
    front: str, workers: int, ranks: int, every: int, dialogues: Path
) -> None:
    """Without end also in a later epoch than the first; others count alike, and their next pass is
    whole."""
    found, is_endless = [], "endless" in front
    for rank in range(ranks):
        make = partial(loading, front, dialogues, workers, rank, ranks)
        with make() as loader:
            expected, states = saves(loader, every)
        assert len(states) > len(expected) // every > 0
        for count, state in states.items():
            with make() as resumed:
                resumed.load_state_dict(pickle.loads(state))
                rest = islice(resumed, MOST - count) if is_endless else resumed
                assert content(rest) == expected[count:], count
                if front in DATASETS and not is_endless and ranks == 1:
                    assert resumed.dataset.set_aside == {"overlong": 2}
                    assert content(resumed) == expected
        found += [number for pack, _ in expected for number in pack]
    samples = range(len(LENGTHS)) if front in ENERGON else np.flatnonzero(LENGTHS <= 64).tolist()
    times = Counter(found)
    assert sorted(times) == list(samples)
    assert max(times.values()) > 1 if is_endless else len(found) == len(samples)
    assert max(times.values()) - min(times.values()) <= 2


def test_a_worker_that_is_killed_ends_the_run_and_its_state_goes_on(dialogues: Path) -> None:
    with loading("Energon", dialogues, workers=1) as loader:
        rows = iter(loader)
        content([next(rows)])
        state = pickle.dumps(loader.state_dict())
        expected = content([next(rows)])
        with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
            kill_worker(loader.loader, rows)
    with loading("Energon", dialogues, workers=1) as resumed:
        resumed.load_state_dict(pickle.loads(state))
        assert content(islice(resumed, 1)) == expected


def test_samples_of_known_length_are_not_read_again() -> None:
    iterator = iter(dataset := packed(lengths=LENGTHS))
    for _ in range(9):
        next(iterator)
    resumed = packed(lengths=LENGTHS)
    resumed.load_state_dict(dataset.state_dict())
    again = iter(resumed)
    assert resumed.dataset.asked == []
    assert numbers(again) == numbers(iterator)


def test_states_are_plain_and_hold_no_samples() -> None:
    """As torch.load reads them without running code."""
    for make in DATASETS.values():
        iterator = iter(dataset := make())
        next(iterator)
        torch.save(dataset.state_dict(), file := io.BytesIO())
        load_state(io.BytesIO(file.getvalue()))
    large = {"length": 10, "pixels": np.zeros(1_000_000, np.uint8)}
    iterator = iter(dataset := PackedIterableDataset([large] * 50, seq_length=64, buffer_size=20))
    next(iterator)
    assert len(pickle.dumps(dataset.state_dict())) < 5_000


def test_other_settings_readers_and_samples_are_refused() -> None:
    few: dict[str, Any] = {"samples": LENGTHS[:4]}
    known: dict[str, Any] = {"lengths": LENGTHS}
    shuffle = {"shuffle": True}  # of more samples the order is another one
    for saved, options, message in (
        ({}, {"buffer_size": 8}, "the saved state is of buffer_size 7, and now it is 8"),
        ({}, {"strategy": "auto"}, "of strategy 'binpack', and now it is 'auto'"),
        ({}, shuffle, "of shuffle False, and now it is True"),
        ({}, {"rank": 0, "world_size": 2}, "of world_size 1, and now it is 2"),
        (shuffle, {**shuffle, "samples": [*LENGTHS, 5]}, "of num_samples 60, and now it is 61"),
        ({}, {"samples": LENGTHS // 2 + 1}, r"sample \d+ has \d+ tokens, and had \d+ before"),
        ({}, few, "the dataset has 4 samples, and more had been read"),
        (known, {**few, "lengths": LENGTHS[:4]}, "the dataset has 4 samples, and more had been"),
        ({"kind": Stream}, {**few, "kind": Stream}, "ended after 4 samples, and had 8"),
    ):
        iterator = iter(dataset := packed(**saved))
        next(iterator)
        other = packed(**options)
        other.load_state_dict(dataset.state_dict())
        with pytest.raises(StageError, match=message):
            iter(other)


def test_ranks_are_those_of_torch_distributed() -> None:
    """Also in a spawned worker, which gets the dataset pickled and is in no process group."""
    for rank in range(2):
        with as_rank(rank, 2):
            found, pickled = numbers(packed()), pickle.dumps(packed())
        assert found == numbers(packed(rank=rank, world_size=2))
        assert numbers(pickle.loads(pickled)) == found
