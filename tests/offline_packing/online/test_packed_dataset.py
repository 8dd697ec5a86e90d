"""Packs of PackedIterableDataset: ms-swift's, the published loop's, ours; every sample once."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import binpacking
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from offline_packing.errors import ConfigError, StageError
from offline_packing.online.datasets import (
    PackedDatasetWrapper,
    PackedIterableDataset,
    PackingBlock,
)
from offline_packing.online.online_dataset import MAX_FAILURES_IN_A_ROW
from task_encoders.samples import SampleError
from tests.helpers.online_samples import Indexed, Stream, lettered, numbered


def pack(lengths: Sequence[int], seq_length: int, **options: Any) -> list[list[int]]:
    dataset = PackedIterableDataset(Indexed(numbered(lengths)), seq_length=seq_length, **options)
    return [[sample["number"] for sample in pack] for pack in dataset]


#: Made by `PackingDataset.create_packed_idx` of ms-swift 4.6.0, PACKING_BATCH_SIZE = 10.
LENGTHS = [30, 7, 52, 18, 44, 9, 61, 23, 5, 38, 27, 64, 12, 33, 49, 3, 21, 58, 16, 41, 11, 36, 2]
MS_SWIFT = {
    "binpack": "6 | 2 5 | 4 3 | 9 7 | 11 | 17 8 | 14 12 15 | 19 16 | 13 0 | 21 10 | 18 20 1 22",
    "sequential": "0 1 | 2 | 3 4 | 5 | 6 | 7 8 | 9 | 10 | 11 | 12 13 | 14 15 | 16 | 17 | 18 19 | "
    "20 21 22",
}


@pytest.mark.parametrize("strategy", MS_SWIFT)
def test_packs_are_those_of_ms_swift(strategy: str) -> None:
    expected = [[*map(int, one.split())] for one in MS_SWIFT[strategy].split("|")]
    assert pack(LENGTHS, 64, buffer_size=10, strategy=strategy) == expected
    assert sorted(chain(*expected)) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("strategy", ["binpack", "sequential", "auto"])
def test_windows_count_usable_samples(strategy: str) -> None:
    """ms-swift's count those too that it cannot use: here these change no pack."""
    samples = numbered(LENGTHS)
    options = {"seq_length": 64, "buffer_size": 10, "strategy": strategy}
    expected = list(PackedIterableDataset(Indexed(samples), **options))
    for place in (3, 9, 15):
        samples.insert(place, {"number": -1, "length": 65})
    assert list(PackedIterableDataset(Indexed(samples), **options)) == expected


def published_loop(lengths: Sequence[int], seq_length: int, buffer_size: int) -> Any:
    """Do as the published wrapper does: fill a buffer, pack it, give everything out."""
    for begin in range(0, len(lengths), buffer_size):
        window = list(enumerate(lengths))[begin : begin + buffer_size]
        for group in binpacking.to_constant_volume(window, seq_length, weight_pos=1):
            yield [number for number, _ in group]


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60), buffer_size=st.integers(1, 70)
)
@settings(max_examples=60, deadline=None)
def test_emitting_equals_the_published_loop(lengths, buffer_size) -> None:
    expected = list(published_loop(lengths, 64, buffer_size))
    assert pack(lengths, 64, buffer_size=buffer_size, leftovers="emit") == expected


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    buffer_size=st.integers(1, 30),
    strategy=st.sampled_from(["binpack", "sequential", "auto", "first_fit_decreasing"]),
    leftovers=st.sampled_from(["carry", "emit"]),
)
@settings(max_examples=60, deadline=None)
def test_every_sample_is_in_one_pack(lengths, buffer_size, strategy, leftovers) -> None:
    options = {"strategy": strategy, "leftovers": leftovers}
    packs = pack(lengths, 64, buffer_size=buffer_size, **options)
    assert sorted(chain(*packs)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in one) <= 64 for one in packs)


def test_the_wrapper_sets_the_template_and_reads_lazily() -> None:
    template = SimpleNamespace(packing=False, padding_free=False)
    samples = Indexed(lettered(9, 8, 3, 1, 9, 9))
    packed = PackedDatasetWrapper(samples, template, 10, 4)
    assert template.packing is True
    assert template.padding_free is True
    assert samples.asked == []
    first = next(iter(packed))
    assert samples.asked == [0, 1, 2, 3]
    assert [sample["length"] for sample in first] == [9, 1]


def test_shuffling_follows_seed_and_epoch() -> None:
    samples = Indexed(numbered([3] * 40))
    packed = PackedIterableDataset(samples, seq_length=12, shuffle=True, seed=5)

    def orders() -> list[int]:
        return [sample["number"] for pack in packed for sample in pack]

    first = orders()
    assert orders() == first
    packed.set_epoch(1)
    second = orders()
    assert second != first
    assert sorted(second) == sorted(first) == list(range(40))

    loader = DataLoader(packed, batch_size=None, num_workers=1, persistent_workers=True)
    for epoch, expected in enumerate((first, second)):
        packed.set_epoch(epoch)  # seen by the worker, which lives on
        assert [sample["number"] for pack in loader for sample in pack] == expected


class Epochs(Stream):
    """Has an epoch of its own."""

    def set_epoch(self, epoch: int) -> None:
        self._samples = self._samples[epoch:]


def test_the_epoch_is_handed_to_the_dataset() -> None:
    packed = PackedIterableDataset(Epochs(numbered([5, 6, 7])), seq_length=64)
    packed.set_epoch(1)
    assert [sample["length"] for pack in packed for sample in pack] == [7, 6]


def test_bad_samples_are_set_aside_and_counted(caplog) -> None:
    samples: list[Any] = lettered(4, 2, 3)
    samples[1:1] = [SampleError("bad_image", "no bytes"), OSError("no such file"), {"text": "?"}]
    samples += [{"length": 0}, {"length": 65}, {"length": 3, "input_ids": [1]}]
    packed = PackedIterableDataset(Indexed(samples), seq_length=64)
    (found,) = packed
    assert sorted(sample["length"] for sample in found) == [2, 3, 4]
    assert packed.set_aside == {"bad_image": 1, "bad_record": 4, "overlong": 1}
    assert "set aside sample 2: bad_record: OSError: no such file" in caplog.text
    assert "sample 7: overlong: 65 tokens, a pack holds 64" in caplog.text

    loader = DataLoader(packed, batch_size=None, num_workers=2)
    assert sum(map(len, loader)) == 3
    assert packed.set_aside["overlong"] == 2  # counted in a worker, and seen here


def test_with_lengths_samples_are_read_when_their_pack_is_made(caplog) -> None:
    lengths = [30, 34, 65, 20, 44, 1]
    samples: list[Any] = numbered(lengths)
    samples[3] = OSError("no such file")
    samples[5]["length"] = 2
    dataset = Indexed(samples)
    packed = PackedIterableDataset(dataset, seq_length=64, buffer_size=5, lengths=lengths)
    packs = iter(packed)
    assert [sample["number"] for sample in next(packs)] == [4]  # without 3, which cannot be read
    assert dataset.asked == [4, 3]
    assert [[sample["number"] for sample in pack] for pack in packs] == [[1, 0]]
    assert sorted(dataset.asked) == [0, 1, 3, 4, 5]  # 2 is too long for any pack
    assert packed.set_aside == {"overlong": 1, "bad_record": 2}
    assert "sample 5: bad_record: 2 tokens, and its length was given as 1" in caplog.text
    with pytest.raises(ValueError, match="1 lengths: give one for each sample"):
        PackedIterableDataset(dataset, seq_length=64, lengths=[3])


def test_samples_of_a_stream_are_encoded_by_their_reader(caplog) -> None:
    def encode(length: int) -> dict[str, int]:
        encoded.append(length)
        return {"length": 60 // length}

    encoded: list[int] = []
    packed = PackedIterableDataset(
        Stream([3, 0, 2, 6, 1]), seq_length=64, encode=encode, rank=1, world_size=2
    )
    (found,) = packed
    assert [sample["length"] for sample in found] == [10]
    assert encoded == [0, 6]
    assert packed.set_aside == {"bad_record": 1}
    assert "sample 1: bad_record: ZeroDivisionError" in caplog.text


class Short(Stream):
    """Has a length that is not true."""

    def __len__(self):
        return len(self._samples) + 2


def failing():
    yield {"length": 3}
    raise OSError("connection reset")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "the dataset is empty"),
        (Stream([]), "the dataset is empty"),
        (Short(numbered([3] * 3)), "the dataset ended after 3 samples, and its length is 5"),
        (failing(), "the dataset failed after 1 samples: OSError: connection reset"),
        (
            numbered([65, 70]),
            "no sample can be used, the last one because of overlong: 70 tokens, a pack holds 64",
        ),
        (
            Indexed([OSError("disk gone")] * 200),
            f"{MAX_FAILURES_IN_A_ROW} samples in a row cannot be read, the last one, 99, with "
            "bad_record: OSError: disk gone",
        ),
    ],
)
def test_sources_that_fail_end_in_one_line(dataset, message) -> None:
    with pytest.raises(StageError, match=message) as error:
        list(PackedIterableDataset(dataset, seq_length=64))
    assert "\n" not in str(error.value)


def test_arguments_are_checked() -> None:
    for options, message in (
        ({"strategy": "best"}, "strategy 'best' is unknown"),
        ({"rank": 1}, "rank and world_size go together"),
        ({"rank": 2, "world_size": 2}, "rank is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedIterableDataset([], **{"seq_length": 64, **options})
    with pytest.raises(ValueError, match="shuffle needs a dataset with indices"):
        PackedIterableDataset(Stream([]), seq_length=64, shuffle=True)


def test_the_yaml_block(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(
        "model: any\npacking:\n  enabled: true\n  max_length: 10\n  buffer_size: null\n"
    )
    block = PackingBlock.read(path)
    template = SimpleNamespace()
    packed = block.wrap(lettered(4, 2, 3, 1), template)
    assert isinstance(packed, PackedDatasetWrapper)
    assert packed.packing.buffer_size == 1000
    assert [sum(sample["length"] for sample in pack) for pack in packed] == [10]
    assert template.padding_free is True

    path.write_text("packing: {max_length: 10}")
    samples = lettered(4, 2)
    assert PackingBlock.read(path).wrap(samples) is samples
    path.write_text("packing: {enabled: true, max_len: 10}")
    with pytest.raises(ConfigError, match="max_len is not a known field"):
        PackingBlock.read(path)
    path.write_text("model: any")
    with pytest.raises(ConfigError, match="has no block packing"):
        PackingBlock.read(path)
