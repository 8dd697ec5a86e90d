"""ConstantLengthDataset: nanoVLM's packs, within every limit, ahead of the trainer; exact loss."""

import gc
import json
import os
import pickle
import runpy
import threading
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from offline_packing.demo.training import IMAGE_TOKEN, tiny_qwen2_vl, token_losses
from offline_packing.errors import StageError
from offline_packing.online.collate import padding_free_collator
from offline_packing.online.constant_length import ConstantLengthDataset
from task_encoders.families import build_sample_encoder
from tests.helpers.online_samples import Indexed, Stream
from tests.helpers.texts_and_images import random_samples

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


def test_rows_have_one_length() -> None:
    given = [{"input_ids": torch.full((length,), length)} for length in (5, 9, 3, 7, 6)]
    rows = list(
        constant_length(Indexed(given), seq_length=12, delta=0, yields="rows", pad_token_id=99)
    )
    assert [row["input_ids"].shape for row in rows] == [(1, 12)] * 3
    found = []
    for row in rows:
        lengths = row["cu_seq_lens_q"].diff().tolist()
        assert row["position_ids"].tolist() == [[i for n in lengths for i in range(n)]]
        found += [n for n in lengths if (row["input_ids"] == n).sum() == n]
    assert sorted(found) == [3, 5, 6, 7, 9]
    assert sum(int((row["input_ids"] == 99).sum()) for row in rows) == 3 * 12 - 30
    with pytest.raises(ValueError, match="yields is 'row'; it must be 'samples' or 'rows'"):
        constant_length(Indexed(given), yields="row")


def test_faults_of_the_source_are_one_clear_error_at_the_trainer() -> None:
    class Failing(Stream):
        def __iter__(self):
            yield from self._samples
            raise OSError("the disk is gone")

    class Short(Stream):
        def __len__(self) -> int:
            return 12

    for dataset, message in (
        (Failing(drawn(5)), r"failed after 5 samples: OSError: the disk is gone"),
        (Short(drawn(5)), r"ended after 5 samples, and its length is 12"),
        (Stream([]), "the dataset is empty"),
        (Indexed([]), "the dataset is empty"),
    ):
        with pytest.raises(StageError, match=message):
            list(constant_length(dataset))
    with pytest.raises(StageError, match=r"the disk is gone"):
        list(DataLoader(constant_length(Failing(drawn(5))), batch_size=None, num_workers=2))


def producers() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


def test_a_trainer_that_stops_midway_leaves_no_thread() -> None:
    dataset = constant_length(Indexed(drawn(1000)), buffer_size=100, queue_size=2)
    for taken, _ in enumerate(dataset):
        if taken == 3:
            assert producers() == 1
            break
    gc.collect()
    end = time.monotonic() + 60
    while producers() and time.monotonic() < end:
        time.sleep(0.01)
    assert producers() == 0


@pytest.mark.parametrize("strategy", ["knapsack", "auto"])
@pytest.mark.parametrize("taken", [0, 1, 17, 60])
def test_it_goes_on_where_its_state_was_taken(strategy: str, taken: int) -> None:
    def make() -> ConstantLengthDataset:
        return constant_length(Indexed(drawn(500)), strategy=strategy, buffer_size=60)

    dataset = make()
    packs = iter(dataset)
    begin = [next(packs) for _ in range(taken)]
    state = dataset.state_dict()
    resumed = make()
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    whole = numbers(make())
    assert numbers(begin) + numbers(resumed) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_goes_on_with_the_pack_that_comes_next(num_workers: int) -> None:
    def make() -> Any:
        dataset = constant_length(Indexed(drawn(300)), buffer_size=40, queue_size=3)
        return StatefulDataLoader(dataset, batch_size=None, num_workers=num_workers)

    loader = make()
    packs = iter(loader)
    begin = [next(packs) for _ in range(9)]
    state = pickle.dumps(loader.state_dict())
    resumed = make()
    resumed.load_state_dict(pickle.loads(state))
    assert numbers(begin) + numbers(resumed) == numbers(make())


def test_packed_loss_and_gradients_equal_unpacked_ones(tmp_path: Path) -> None:
    encoder = build_sample_encoder("qwen2_vl", max_pixels=16 * 784)
    encoded = [
        encoder.encode(sample, files)
        for kind in ("one_image", "multi_image", "text_only")
        for sample, files in random_samples(kind, 1, tmp_path)
    ]
    packs = list(constant_length(Indexed(encoded), seq_length=512, delta=0))
    assert max(map(len, packs)) > 1
    rows = [padding_free_collator(pack, pad_to_length=512) for pack in packs]
    without_boundaries = [
        {name: value for name, value in row.items() if not name.startswith("cu_seq_lens")}
        | {"position_ids": torch.cat([torch.arange(512)[None, None], row["position_ids"][1:]])}
        for row in rows
    ]
    model = tiny_qwen2_vl(weight_std=0.08).eval()
    alone, alone_gradients = losses_and_gradients(model, map(unpacked, chain(*packs)))
    packed, packed_gradients = losses_and_gradients(model, rows)
    with torch.no_grad():
        control = torch.cat([token_losses(model, **row) for row in without_boundaries])
    assert (packed - alone).abs().max() <= 1e-5
    for name, gradient in alone_gradients.items():
        difference = (packed_gradients[name] - gradient).abs().max()
        assert difference <= 1e-4 * gradient.abs().max(), name
    assert (control - alone).abs().max() >= 0.1


def losses_and_gradients(
    model: Any, rows: Iterable[dict[str, Any]]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of every labelled token, and the gradients of their sum."""
    model.zero_grad()
    losses = []
    for row in rows:
        losses.append(token_losses(model, **row))
        losses[-1].sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat(losses).detach(), found


def unpacked(sample: Any) -> dict[str, Any]:
    """The inputs of a sample alone: the model itself finds the positions."""
    tokens = torch.from_numpy(sample.tokens)[None]
    inputs = {
        "input_ids": tokens,
        "labels": torch.from_numpy(sample.labels)[None],
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).int(),
        "use_cache": False,
    }
    if len(sample.image_grid_thw):
        inputs["pixel_values"] = torch.from_numpy(sample.pixel_values)
        inputs["image_grid_thw"] = torch.from_numpy(sample.image_grid_thw).long()
    return inputs
