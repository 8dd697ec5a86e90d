"""ConstantLengthDataset: nanoVLM's packs, within every limit, ahead of the trainer; exact loss."""

import json
import os
import runpy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from offline_packing.online.datasets import ConstantLengthDataset
from tests.helpers.online_samples import Indexed

GOLDEN = Path(__file__).parents[1] / "planner" / "strategies" / "nanovlm_knapsack.json"
SEQ_LENGTH = 1024


def samples(lengths: Any, images: Any) -> list[dict[str, Any]]:
    return [
        {"number": number, "length": int(length), "images": [None] * int(count)}
        for number, (length, count) in enumerate(zip(lengths, images, strict=True))
    ]


def drawn(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5, 0.8, count), 1, SEQ_LENGTH)
    return samples(lengths, rng.integers(0, 5, count))


def numbers(packs: Any) -> list[list[int]]:
    return [[sample["number"] for sample in pack] for pack in packs]


def constant_length(dataset: Any, **options: Any) -> ConstantLengthDataset:
    return ConstantLengthDataset(dataset, **{"seq_length": SEQ_LENGTH, **options})


def test_packs_are_those_that_nanovlm_makes_of_200_random_buffers() -> None:
    buffers = json.loads(GOLDEN.read_text())["buffers"]
    assert len(buffers) == 200
    for buffer in buffers:
        dataset = constant_length(
            Indexed(samples(buffer["lengths"], buffer["images"])),
            seq_length=buffer["seq_length"],
            max_images_per_pack=buffer["max_images"] or 1_000_000,
            delta=buffer["delta"],
        )
        expected = sorted(sorted(pack) for pack in buffer["packs"])
        assert sorted(sorted(pack) for pack in numbers(dataset)) == expected


def test_packs_with_a_separator_are_those_of_nanovlm() -> None:
    """It appends a token to each sample before it packs. Without the option many packs differ."""
    equal = {0: 0, 1: 0}
    buffers = json.loads(GOLDEN.read_text())["buffers"][::5]
    buffers = [buffer for buffer in buffers if min(buffer["lengths"]) > 1]
    for buffer in buffers:
        expected = sorted(sorted(pack) for pack in buffer["packs"])
        for separator in equal:
            dataset = constant_length(
                Indexed(samples(np.array(buffer["lengths"]) - 1, buffer["images"])),
                seq_length=buffer["seq_length"],
                separator_tokens=separator,
                max_images_per_pack=buffer["max_images"] or 1_000_000,
                delta=buffer["delta"],
            )
            equal[separator] += sorted(sorted(pack) for pack in numbers(dataset)) == expected
    assert equal[1] == len(buffers) > 30
    assert equal[0] < 0.8 * len(buffers)


@pytest.mark.skipif("NANOVLM" not in os.environ, reason="NANOVLM=DIR names no checkout of nanoVLM")
def test_packs_are_those_of_nanovlms_whole_dataset() -> None:
    """A sample of max_sample_length is left out there."""
    module = runpy.run_path(f"{os.environ['NANOVLM']}/data/advanced_datasets.py")
    for seed in range(5):
        given = drawn(400, seed)
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


@pytest.mark.parametrize("strategy", ["knapsack", "auto", "first_fit_decreasing"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_once_within_tokens_and_images(strategy: str, num_workers: int) -> None:
    given = drawn(1000)
    dataset = constant_length(Indexed(given), strategy=strategy, buffer_size=200)
    packs = list(DataLoader(dataset, batch_size=None, num_workers=num_workers))
    assert sorted(chain(*numbers(packs))) == list(range(1000))
    assert max(sum(sample["length"] for sample in pack) for pack in packs) <= SEQ_LENGTH
    images = [sum(len(sample["images"]) for sample in pack) for pack in packs]
    assert 15 < max(images) <= 18


def test_limits_of_a_sample_set_it_aside_and_count_it() -> None:
    given = samples([600, 500, 501, 100, 1025, 100, 0], [0, 4, 0, 5, 0, 4, 0])
    dataset = constant_length(Indexed(given), max_sample_length=500, max_images_per_sample=4)
    assert sorted(chain(*numbers(dataset))) == [1, 5]
    assert dataset.set_aside == {"overlong": 3, "over_budget": 1, "bad_record": 1}
    assert sorted(chain(*numbers(constant_length(Indexed(given))))) == [0, 1, 2, 3, 5]


def test_lengths_without_images_are_refused() -> None:
    """Packs would hold more images than their budget."""
    dataset = drawn(20)
    with pytest.raises(ValueError, match="lengths tell of no images"):
        constant_length(dataset, lengths=[sample["length"] for sample in dataset])
