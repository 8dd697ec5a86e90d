"""LLaMA-Factory on packs, and against what its own packing makes of the same samples."""

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback

from launch.trainers.llama_factory import tuner
from offline_packing.demo.training import tiny_qwen2_vl
from task_encoders.concatenate import merge_rows, split_row
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.model_inputs import segment_kwargs
from tests.helpers.datasets import mixed_pairs
from tests.helpers.hf_trainers import number_of
from tests.helpers.hf_videos import with_processor
from tests.helpers.llama_factory import (
    CAPTIONS,
    OwnPacking,
    order_of_knapsack,
    recipe,
    train,
    without_newlines,
)
from tests.helpers.parity import check_losses
from tests.helpers.peers import (
    assert_same,
    check_order,
    open_packs,
    pack_dialogues,
    stored_samples,
)
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_families import encoder_options

Say = Callable[[str], None]
VERSION = f"LLaMA-Factory {version('llamafactory')}"


@pytest.fixture(scope="module")
def family() -> str:
    return "qwen2_vl"


@pytest.fixture(scope="module")
def case(case: Any) -> Any:
    limits = {name: encoder_options("qwen2_vl")[name] for name in ("min_pixels", "max_pixels")}
    with_processor(case[0], **limits)
    return case


def unpacked_loss(checkpoint: Path, packed: Path, number: int) -> float:
    """Loss of a pack's samples, each encoded by LLaMA-Factory and trained alone."""
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint)
    own = OwnPacking("qwen2_vl", processor, model, "sdpa")
    end, newline = processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "Ċ"])
    total, count = 0.0, 0
    for sample in stored_samples(open_packs(packed)[number]):
        (pack,) = own.pack([sample], 512)
        row = without_newlines(own.row(pack), pack, end, newline)
        media = {name: row[name] for name in ("pixel_values", "image_grid_thw") if sample[1]}
        labels = int((row["labels"] != -100).sum())
        with torch.no_grad():
            loss = model(
                input_ids=row["input_ids"][None],
                labels=row["labels"][None],
                position_ids=row["position_ids"][1:],  # without the first, which is time
                use_cache=False,
                **media,
            ).loss
        total += float(loss) * labels
        count += labels
    return total / count


def test_steps_are_those_of_our_own_trainer_and_are_resumed(
    case: Any, tmp_path: Path, say: Say
) -> None:
    steps = {"max_steps": 6, "save_steps": 3}
    whole = train(*case, tmp_path / "whole", **steps)
    assert whole.numbers == list(range(6))
    difference = check_losses(case[1], case[0], whole.losses, tmp_path / "ours")
    assert abs(unpacked_loss(*case, 0) - whole.losses[0]) < 1e-4
    saved = str(tmp_path / "whole/checkpoint-3")
    rest = train(*case, tmp_path / "again", **steps, resume_from_checkpoint=saved)
    assert rest.numbers == whole.numbers[3:]
    assert rest.losses == whole.losses  # those of the first three are in the checkpoint
    assert all(map(torch.equal, rest.weights, whole.weights))
    say(
        f"{VERSION}: loss before and after a step as launch.train's (to {difference:.0e}) and as "
        "of the samples alone, 6 steps resumed after 3 to the last bit"
    )


class _Order(TrainerCallback):
    """Reads an epoch before the first step."""

    def __init__(self, packed: Path) -> None:
        self._packs = open_packs(packed)
        self.numbers: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rows = kwargs["train_dataloader"]
        self.numbers = [number_of(row["input_ids"], self._packs) for row in rows]


def numbers_read(packed: Path, checkpoint: Path, output: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    order = _Order(packed)
    folder = output / os.environ["WORLD_SIZE"]  # it goes on in a folder that has a run
    arguments = recipe(checkpoint, packed, folder, max_steps=1, save_strategy="no")
    tuner.run_exp(arguments, [order])
    return order.numbers


def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = case
    check_order(packed, tmp_path, numbers_read, checkpoint, tmp_path / "out")
    say(f"{VERSION}: order of packs kept on 1, 2 and 4 ranks")


def rank_run(checkpoint: Path, packed: Path, output: Path) -> tuple[list[int], list[float]]:
    """Packs and losses of a rank."""
    run = train(checkpoint, packed, output, max_steps=4, save_strategy="no")
    return run.numbers, run.losses


def test_ranks_with_and_without_images_train_what_one_does(
    case: Any, tmp_path: Path, say: Say
) -> None:
    """DDP would wait for the vision tower of the rank that has no image."""
    checkpoint, _ = case
    pairs = mixed_pairs(tmp_path / "source", 60)
    packed = pack_dialogues(pairs, "qwen2_vl", checkpoint, tmp_path, seq_length=200)
    columns = open_packs(packed).columns()
    assert columns is not None
    has_images = columns.media[:8] > 0
    assert (has_images[::2] != has_images[1::2]).any()
    ranks = run_ranks(2, tmp_path / "ranks", rank_run, checkpoint, packed, tmp_path / "two")
    assert [numbers for numbers, _ in ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    alone = train(
        *(checkpoint, packed, tmp_path / "one"),
        max_steps=4,
        save_strategy="no",
        gradient_accumulation_steps=2,
    )
    assert alone.numbers == list(range(8))
    difference = max(abs(a - b) for a, b in zip(alone.losses, ranks[0][1], strict=True))
    assert difference < 1e-4
    say(f"{VERSION}: two ranks, some steps with images on one alone, as one (to {difference:.0e})")


def test_every_demo_pack_is_what_its_packing_would_give(
    task: str, demo: dict[str, Path], say: Say
) -> None:
    """Rows that `neat_packing` makes of a pack's samples, which it sorts by length."""
    template, model = CAPTIONS if task == "captioning" else "qwen2_vl", tiny_qwen2_vl()
    num_packs = num_samples = 0
    for split in ("train", "val"):
        packs = open_packs(demo[task], split)
        vision = packs.task_encoder.encoder.vision
        processor = builtin_processor(min_pixels=vision.min_pixels, max_pixels=vision.max_pixels)
        end, newline = processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "Ċ"])
        own = OwnPacking(template, processor, model)
        for number, stored in enumerate(packs):
            samples = list(stored_samples(stored))
            (pack,) = own.pack(samples, packs.task_encoder.seq_length + 8 * len(samples))
            theirs = without_newlines(own.row(pack), pack, end, newline)
            row = packs.row(number).row
            order = order_of_knapsack(row.cu_lengths.diff().tolist())
            ours = merge_rows([split_row(row)[sample] for sample in order])
            segments = segment_kwargs(ours.position_ids[:, None], ours.cu_lengths)
            expected = {
                "input_ids": ours.tokens,
                "labels": ours.labels,
                "boundaries": ours.cu_lengths,
                "position_ids": segments["position_ids"],
                "pixel_values": ours.pixel_values,
                "image_grid_thw": ours.image_grid_thw,
            }
            # Its first row, which should count tokens, is M-RoPE's time.
            expected["position_ids"][0] = expected["position_ids"][1]
            if not len(ours.image_grid_thw):  # it adds a masked image
                del expected["pixel_values"], expected["image_grid_thw"]
            assert_same(theirs, expected, f"{task} {split} {number}")
            num_packs += 1
            num_samples += len(samples)
    assert num_samples > num_packs > 5
    say(f"{VERSION}: {num_packs} packs of {task} are what its neat_packing makes of their samples")
