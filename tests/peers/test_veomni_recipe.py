"""Recipes of VeOmni on packs: the one in docs/integrations.md, and what is wrong in others."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from veomni.arguments import parse_args
from veomni.data import build_data_transform
from veomni.data.data_collator import MainCollator
from veomni.trainer.base import BaseTrainer
from veomni.trainer.vlm_trainer import VeOmniVLMArguments

import launch.trainers.veomni
from launch.loop.parallel import initialize_parallel
from tests.helpers.markdown import blocks
from tests.helpers.peers import check_contradictions, open_packs

PAGE = Path(__file__).parents[2] / "docs/integrations.md"


@pytest.fixture(autouse=True)
def _one_rank() -> None:
    initialize_parallel(1)  # its loader asks for the rank


def parse(
    file: Path, checkpoint: Path, packed: Path, overrides: Mapping[str, Any] | None = None
) -> VeOmniVLMArguments:
    """The recipe of the documentation, for this model and these packs, as the command parses it."""
    (text,) = [block.text for block in blocks(PAGE.read_text()) if "dyn_bsz" in block.text]
    file.write_text(text)
    values = {
        "model.model_path": checkpoint,
        "model.ops_implementation.load_balancing_loss_implementation": "eager",  # without triton
        "data.train_path": packed,
        "data.dataloader.num_workers": 0,
        "data.dataloader.pin_memory": False,
        "train.global_batch_size": 2,
        **(overrides or {}),
    }
    arguments = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["veomni", str(file), *arguments])
        args: VeOmniVLMArguments = parse_args(VeOmniVLMArguments)
    return args


def build(args: VeOmniVLMArguments) -> Any:
    """A trainer's data, as VeOmni builds it."""
    tokenizer = AutoTokenizer.from_pretrained(args.model.tokenizer_path)
    transform = build_data_transform("qwen2_5_vl", processor=SimpleNamespace(tokenizer=tokenizer))
    trainer = SimpleNamespace(args=args, data_transform=transform, collate_fn=MainCollator())
    BaseTrainer._build_dataset(trainer)
    BaseTrainer._build_dataloader(trainer)
    return trainer


def test_the_documented_recipe_trains_every_pack(case: tuple[Path, Path], tmp_path: Path) -> None:
    args = parse(tmp_path / "recipe.yaml", *case)
    assert not args.train.dyn_bsz
    trainer = build(args)
    packs = open_packs(case[1])
    assert trainer.train_steps == len(trainer.train_dataloader) == len(packs) // 2 > 2
    rows = [row for step in trainer.train_dataloader for row in step]
    for number, row in enumerate(rows):
        boundaries = packs.batch([number]).cu_lengths[0]
        assert torch.equal(row["cu_seq_lens_q"], boundaries.to(row["cu_seq_lens_q"]))
        assert torch.equal(row["labels"], packs.batch([number]).labels)


def test_several_packs_are_one_row(case: tuple[Path, Path], tmp_path: Path) -> None:
    singles = build(parse(tmp_path / "recipe.yaml", *case)).train_dataloader
    args = parse(tmp_path / "recipe.yaml", *case, {"train.micro_batch_size": 2})
    (pair,) = next(iter(build(args).train_dataloader))
    first, second = next(iter(singles))
    for name in ("input_ids", "labels", "position_ids", "image_mask", "attention_mask"):
        assert torch.equal(pair[name], torch.cat([first[name], second[name]], dim=-1))
    pixels = [row["pixel_values"] for row in (first, second) if "pixel_values" in row]
    assert torch.equal(pair["pixel_values"], torch.cat(pixels))
    ends = [first["cu_seq_lens_q"], second["cu_seq_lens_q"][1:] + first["cu_seq_lens_q"][-1]]
    assert torch.equal(pair["cu_seq_lens_q"], torch.cat(ends))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.dyn_bsz": True}, r"set train\.dyn_bsz false"),
        ({"data.datasets_type": "iterable"}, r"set data\.datasets_type mapping, not iterable"),
        ({"data.datasets_type": "energon"}, r"set data\.datasets_type mapping, not energon"),
    ],
)
def test_what_packs_do_not_do_is_refused(
    overrides: dict[str, Any], message: str, case: tuple[Path, Path], tmp_path: Path
) -> None:
    args = parse(tmp_path / "recipe.yaml", *case, overrides)
    with pytest.raises(ValueError, match=message) as caught:
        build(args)
    assert "\n" not in str(caught.value)


def test_packs_that_contradict_model_or_environment_are_refused(
    case: tuple[Path, Path], tmp_path: Path
) -> None:
    check_contradictions(
        lambda model, packs: build(parse(tmp_path / "recipe.yaml", model, packs)),
        case,
        tmp_path / "other",
    )


def test_other_data_go_veomnis_way(case: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"a": 1}\n{"a": 2}\n')
    args = parse(tmp_path / "recipe.yaml", case[0], text)
    build_dataset = launch.trainers.veomni.DATASET_REGISTRY["mapping"]
    dataset = build_dataset(train_path=args.data.train_path, transform=lambda row, **_: [row])
    assert [dataset[i] for i in range(2)] == [[{"a": 1}], [{"a": 2}]]
