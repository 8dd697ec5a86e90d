"""The three datasets and their pool: packs of ms-swift, nanoVLM and VeOmni, and ours; every sample
once, within every limit; what is set aside."""

import json
import os
import runpy
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import binpacking
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from offline_packing.errors import ConfigError, StageError
from offline_packing.online.collate import padding_free_collator
from offline_packing.online.datasets import (
    ConstantLengthDataset,
    DynamicBatches,
    PackedDatasetWrapper,
    PackedIterableDataset,
    PackingBlock,
)
from offline_packing.online.online_dataset import MAX_FAILURES_IN_A_ROW
from offline_packing.online.pools import FixedCount, MatchedWindows, PackingPool, TokenBudget
from task_encoders.samples import SampleError
from tests.helpers.online_samples import Indexed, Stream, lettered, numbered, numbers
from tests.helpers.sizes import window_options

# --- PackedIterableDataset --------------------------------------------------------------------


#: Made by `PackingDataset.create_packed_idx` of ms-swift 4.6.0, PACKING_BATCH_SIZE = 10.
LENGTHS = [30, 7, 52, 18, 44, 9, 61, 23, 5, 38, 27, 64, 12, 33, 49, 3, 21, 58, 16, 41, 11, 36, 2]
MS_SWIFT = {
    "binpack": "6 | 2 5 | 4 3 | 9 7 | 11 | 17 8 | 14 12 15 | 19 16 | 13 0 | 21 10 | 18 20 1 22",
    "sequential": "0 1 | 2 | 3 4 | 5 | 6 | 7 8 | 9 | 10 | 11 | 12 13 | 14 15 | 16 | 17 | 18 19 | "
    "20 21 22",
}


@pytest.mark.parametrize("strategy", MS_SWIFT)
def test_packs_are_those_of_ms_swift(strategy: str) -> None:
    """Whose windows count samples too that it cannot use: here these change no pack."""
    expected = [[*map(int, one.split())] for one in MS_SWIFT[strategy].split("|")]
    assert sorted(chain(*expected)) == list(range(len(LENGTHS)))
    options = {"seq_length": 64, "buffer_size": 10, "strategy": strategy}
    samples = numbered(LENGTHS)
    assert numbers(PackedIterableDataset(samples, **options)) == expected
    for place in (3, 9, 15):
        samples.insert(place, {"number": -1, "length": 65})
    assert numbers(PackedIterableDataset(samples, **options)) == expected


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
    options = {"seq_length": 64, "buffer_size": buffer_size, "leftovers": "emit"}
    packs = numbers(PackedIterableDataset(numbered(lengths), **options))
    assert packs == list(published_loop(lengths, 64, buffer_size))


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


class Epochs(Stream):
    """Has an epoch of its own."""

    def set_epoch(self, epoch: int) -> None:
        self._samples = self._samples[epoch:]


def test_shuffling_follows_seed_and_epoch() -> None:
    """The dataset is told the epoch, too."""
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

    endless = PackedIterableDataset(samples, seq_length=12, shuffle=True, seed=5, repeat=True)
    stream = chain.from_iterable(numbers(islice(endless, 20)))
    assert list(stream) == first + second

    loader = DataLoader(packed, batch_size=None, num_workers=1, persistent_workers=True)
    for epoch, expected in enumerate((first, second)):
        packed.set_epoch(epoch)  # seen by the worker, which lives on
        assert [sample["number"] for pack in loader for sample in pack] == expected

    told = PackedIterableDataset(Epochs(numbered([5, 6, 7])), seq_length=64)
    told.set_epoch(1)
    assert sorted(chain.from_iterable(numbers(told))) == [1, 2]


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


def test_the_yaml_block(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"

    def read(text: str) -> PackingBlock:
        path.write_text(text)
        return PackingBlock.read(path)

    block = read("model: any\npacking: {enabled: true, max_length: 10, buffer_size: null}")
    template = SimpleNamespace()
    packed = block.wrap(lettered(4, 2, 3, 1), template)
    assert isinstance(packed, PackedDatasetWrapper)
    assert packed.settings["buffer_size"] == 1000
    assert [sum(sample["length"] for sample in pack) for pack in packed] == [10]
    assert template.padding_free is True
    samples = lettered(4, 2)
    assert read("packing: {max_length: 10}").wrap(samples) is samples
    assert read("packing: {enabled: false}").wrap(samples) is samples
    for refused, message in (
        ("packing: {enabled: true}", "max_length is missing; set it"),
        ("packing: {max_length: true}", "packing: max_length=True: a number is needed"),
        (
            "packing: {max_length: 10, strategy: greedy}",
            r"strategy='greedy'.*: binpack, sequential, [^;]*; it is sequential$",
        ),
        ("packing: {enabled: true, max_len: 10}", "max_len is not a known field"),
        ("model: any", "has no block packing"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(refused)


# --- ConstantLengthDataset --------------------------------------------------------------------

GOLDEN = Path(__file__).parents[1] / "planner" / "strategies" / "nanovlm_knapsack.json"
SEQ_LENGTH = 1024


def samples(lengths: Any, images: Any) -> list[dict[str, Any]]:
    return [
        {"number": number, "length": int(length), "images": [None] * int(count)}
        for number, (length, count) in enumerate(zip(lengths, images, strict=True))
    ]


def constant_length(dataset: Any, **options: Any) -> ConstantLengthDataset:
    return ConstantLengthDataset(dataset, **{"seq_length": SEQ_LENGTH, **options})


def equals_nanovlm(buffer: dict[str, Any], appended: int = 0, separator: int = 0) -> bool:
    lengths = np.array(buffer["lengths"]) - appended
    dataset = constant_length(
        Indexed(samples(lengths, buffer["images"])),
        seq_length=buffer["seq_length"],
        separator_tokens=separator,
        max_images_per_pack=buffer["max_images"] or 1_000_000,
        delta=buffer["delta"],
    )
    return sorted(map(sorted, numbers(dataset))) == sorted(map(sorted, buffer["packs"]))


def test_packs_are_those_that_nanovlm_makes_of_200_random_buffers() -> None:
    """It appends a token to each sample before it packs: without a separator many packs differ."""
    buffers = json.loads(GOLDEN.read_text())["buffers"]
    assert len(buffers) == 200
    assert all(equals_nanovlm(buffer) for buffer in buffers)
    buffers = [buffer for buffer in buffers[::5] if min(buffer["lengths"]) > 1]
    equal = [sum(equals_nanovlm(one, 1, separator) for one in buffers) for separator in (0, 1)]
    assert equal[1] == len(buffers) > 30
    assert equal[0] < 0.8 * len(buffers)


@pytest.mark.skipif("NANOVLM" not in os.environ, reason="NANOVLM=DIR names no checkout of nanoVLM")
def test_packs_are_those_of_nanovlms_whole_dataset() -> None:
    """A sample of max_sample_length is left out there."""
    module = runpy.run_path(f"{os.environ['NANOVLM']}/data/advanced_datasets.py")
    for seed in range(5):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(5, 0.8, 400), 1, SEQ_LENGTH)
        given = samples(lengths, rng.integers(0, 5, 400))
        tensors = [
            {
                "input_ids": torch.full((sample["length"],), sample["number"]),
                "labels": torch.zeros(sample["length"], dtype=torch.long),
                "attention_mask": torch.ones(sample["length"], dtype=torch.long),
                "images": sample["images"],
            }
            for sample in given
        ]
        dataset: Any = Indexed(tensors)
        dataset.dataset, dataset.mp_image_token_length = tensors, 64
        dataset.tokenizer = SimpleNamespace(pad_token_id=-1)
        options = {"max_sample_length": 900, "seq_length": SEQ_LENGTH, "num_of_sequences": 10_000}
        theirs = module["ConstantLengthDataset"](dataset, **options)
        expected = [sorted({*row["input_ids"].tolist()} - {-1}) for row in theirs]
        ours = constant_length(Indexed(given), max_sample_length=899, separator_tokens=1)
        assert sorted(map(sorted, numbers(ours))) == sorted(expected)


def test_the_room_of_separators_is_padding_at_the_end_of_a_row() -> None:
    given = [{"input_ids": torch.full((length,), length)} for length in (5, 6, 12, 13)]
    options = {"seq_length": 13, "delta": 0, "yields": "rows", "separator_tokens": 1}
    dataset = constant_length(Indexed(given), pad_token_id=99, **options)
    found = sorted(row["input_ids"][0].tolist() for row in dataset)
    assert [sorted(row) for row in found] == [[*[5] * 5, *[6] * 6, 99, 99], [*[12] * 12, 99]]
    assert dataset.set_aside == {"overlong": 1}


def test_limits_of_a_sample_set_it_aside_and_count_it() -> None:
    given = samples([600, 500, 501, 100, 1025, 100, 0], [0, 4, 0, 5, 0, 4, 0])
    dataset = constant_length(Indexed(given), max_sample_length=500, max_images_per_sample=4)
    assert sorted(chain(*numbers(dataset))) == [1, 5]
    assert dataset.set_aside == {"overlong": 3, "over_budget": 1, "bad_record": 1}
    assert sorted(chain(*numbers(constant_length(Indexed(given))))) == [0, 1, 2, 3, 5]


# --- DynamicBatches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "pad_to_length", "options"),
    [
        ((4, 2, 3, 1), None, {"max_seq_len": 10}),
        ((4, 2), 8, {"dyn_bsz": False, "micro_batch_size": 2, "max_seq_len": 4}),
        ((3, 2, 2), 10, {"max_seq_len": 10}),
        # True: the length follows from micro_batch_size × max_seq_len, which a sample may have
        ((7, 1), True, {"micro_batch_size": 2, "max_seq_len": 4}),
        ((3, 2), True, {"dyn_bsz": False, "micro_batch_size": 2, "max_seq_len": 4}),
    ],
)
def test_a_batch_is_the_collators_row(lengths, pad_to_length, options) -> None:
    """The published examples, whose values the collator's own tests have."""
    options |= {"pad_to_length": pad_to_length or False, "pad_token_id": 7}
    (row,) = DynamicBatches(lettered(*lengths), **options)
    length = 8 if pad_to_length is True else pad_to_length
    expected = padding_free_collator(lettered(*lengths), pad_to_length=length, pad_token_id=7)
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(row[name]), torch.as_tensor(value)), name


def test_batches_are_those_of_veomni() -> None:
    """The case of its own test, and the batches that its 0.1.12 makes of the whole of it."""
    options: dict[str, Any] = {"max_seq_len": 32, "buffer_size": 10, "collate": list}
    found = numbers(DynamicBatches(numbered(range(1, 51)), **options))
    tokens = [sum(number + 1 for number in batch) for batch in found]
    assert tokens[:5] == [28, 27, 23, 27, 31]
    assert tokens[5:] == list(range(17, 33))  # each alone; 33 and more are set aside
    shuffled = torch.randperm(50, generator=torch.Generator().manual_seed(42)) + 1
    found = numbers(DynamicBatches(numbered(shuffled), **options))[:5]
    expected = [[18, 1, 9, 4], [31], [21, 3, 2], [26, 6], [19, 7]]
    assert [shuffled[batch].tolist() for batch in found] == expected


Item = tuple[int, int, int]  # number, tokens, images

streams = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), max_size=120).map(
    lambda sizes: [(number, *size) for number, size in enumerate(sizes)]
)
rules = st.one_of(
    window_options(budgets=st.sampled_from([{}, {"images": 5}, {"images": 9}])),
    st.builds(
        MatchedWindows,
        seq_length=st.just(64),
        strategy=st.sampled_from(["to_constant_volume", "sequential", "first_fit_decreasing"]),
        window=st.integers(1, 30),
        seed=st.just(0),
        holds_last=st.booleans(),
    ),
    st.builds(TokenBudget, seq_length=st.integers(60, 160), buffer_size=st.integers(1, 30)),
    st.builds(FixedCount, seq_length=st.just(60), count=st.integers(1, 4)),
)


@given(stream=streams, rule=rules)
@settings(max_examples=100, deadline=None)
def test_every_item_comes_back_once_within_all_limits(stream, rule):
    pool = PackingPool[Item](rule)
    packs = []
    for item in stream:
        packs += pool.add(item, item[1], {"images": item[2], "other": 9})
    assert sorted([*chain(*packs), *pool.waiting]) == stream
    packs += pool.finish()
    assert sorted(chain(*packs)) == stream
    assert pool.waiting == []
    assert [] not in packs
    if isinstance(rule, FixedCount):
        assert [len(pack) for pack in packs[:-1]] == [rule.count] * (len(packs) - 1)
        return
    for pack in packs:
        assert sum(tokens for _, tokens, _ in pack) <= rule.seq_length
        if budgets := getattr(rule, "budgets", None):
            assert sum(images for _, _, images in pack) <= budgets["images"]
