"""TRL's SFTTrainer on packs, and against what its own collator makes of the same samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from click.testing import CliRunner
from datasets import Dataset, Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from launch.train_transformers import main
from launch.trainers.trl_trainer import PackedSFTTrainer
from offline_packing.demo.training import tiny_qwen2_vl
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.sample_encoder import IGNORE_INDEX
from task_encoders.samples import SourceSample
from task_encoders.text.pieces import to_chat
from tests.helpers.hf_trainers import QUIET, check_resuming, numbers_read
from tests.helpers.peers import (
    assert_same,
    check_order,
    largest_difference,
    open_packs,
    our_losses,
    stored_samples,
)

Say = Callable[[str], None]
VERSION = f"TRL {trl.__version__}"
TEMPLATE = (Path(trl.__file__).parent / "chat_templates/qwen2_5_vl_training.jinja").read_text()
END = 151645  # <|im_end|>


def make(
    output: Path, model: Any, packs: Any, checkpoint: Path, **options: Any
) -> PackedSFTTrainer:
    args = SFTConfig(output_dir=str(output), bf16=False, **QUIET, **options)  # bf16 by default
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return PackedSFTTrainer(args=args, model=model, train_dataset=packs, processing_class=tokenizer)


def own_batch(processor: Any, sample: SourceSample, media: list[bytes]) -> Any:
    """What TRL makes of a sample."""
    images = [Image().decode_example({"bytes": data, "path": None}) for data in media]
    if sample.task == "captioning":
        collator = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
        front = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
        caption = f"{sample.turns[0].answer}<|im_end|>"
        return collator([{"images": images, "prompt": front, "completion": caption}])
    collator = DataCollatorForVisionLanguageModeling(
        processor, assistant_only_loss=True, chat_template=TEMPLATE
    )
    messages = to_chat(sample)
    for message in messages:  # in a plain string TRL would look for room for the images
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return collator([{"images": images, "messages": messages}])


def expected_row(model: Any, batches: list[Any]) -> dict[str, Any]:
    """Batches of one sample each, one behind the other as packing has to put them."""
    tokens, labels, positions = [], [], []
    for batch in batches:
        # TRL keeps the newline behind the last end token, and trains those behind all of them,
        # which no model has to write.
        after_end = batch["input_ids"].roll(1) == END
        batch["labels"][after_end] = IGNORE_INDEX
        end = batch["input_ids"].shape[1] - int(after_end[0, -1])
        grid = batch.get("image_grid_thw")
        ids = batch["input_ids"][:, :end]
        types = batch["mm_token_type_ids"][:, :end]
        found, _ = model.model.get_rope_index(ids, types, image_grid_thw=grid)
        positions.append(torch.cat([torch.arange(end)[None, None], found]))
        tokens.append(ids)
        labels.append(batch["labels"][:, :end])
    lengths = torch.tensor([0, *(ids.shape[1] for ids in tokens)])
    images = [batch for batch in batches if "pixel_values" in batch]
    vision = ("pixel_values", "image_grid_thw") if images else ()
    return {
        "input_ids": torch.cat(tokens, dim=1),
        "labels": torch.cat(labels, dim=1),
        "position_ids": torch.cat(positions, dim=2),
        "cu_seq_lens_q": lengths.cumsum(0),
        "max_length_q": int(lengths.max()),
        **{name: torch.cat([batch[name] for batch in images]) for name in vision},
    }


@pytest.mark.parametrize("task", ["captioning", "vqa", "bmr"])
def test_every_demo_pack_holds_what_its_collator_makes_of_the_samples(
    task: str, demo: dict[str, Path], tmp_path: Path, say: Say
) -> None:
    num_packs = num_samples = 0
    for split in ("train", "val"):
        packs = open_packs(demo[task], split)
        vision = packs.task_encoder.encoder.vision
        processor = builtin_processor(min_pixels=vision.min_pixels, max_pixels=vision.max_pixels)
        model, args = tiny_qwen2_vl(), SFTConfig(output_dir=str(tmp_path), **QUIET)
        trainer = PackedSFTTrainer(
            args=args, model=model, train_dataset=packs, processing_class=processor.tokenizer
        )
        for number, row in enumerate(trainer.get_train_dataloader()):
            samples = list(stored_samples(packs[number]))
            batches = [own_batch(processor, *sample) for sample in samples]
            assert_same(row, expected_row(model, batches), f"{task} {split} {number}")
            num_samples += len(samples)
            num_packs += 1
    assert num_samples > num_packs > 5
    say(f"{VERSION}: {num_packs} packs of {task} hold what its collator makes of their samples")


def test_it_refuses_to_pack_pictures_itself(case: Any, tmp_path: Path) -> None:
    checkpoint, _ = case
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    processor = builtin_processor()
    rows = Dataset.from_dict({"messages": [[]], "images": [[]]})
    args = SFTConfig(output_dir=str(tmp_path), **QUIET, packing=True)
    with pytest.raises(ValueError, match="Packing is not supported for vision datasets"):
        SFTTrainer(model, args, train_dataset=rows, processing_class=processor)


def test_steps_are_those_of_our_own_trainer_and_are_resumed(
    case: Any, tmp_path: Path, say: Say
) -> None:
    checkpoint, packed = case
    _, losses = check_resuming(make, checkpoint, packed, tmp_path)
    difference = largest_difference(our_losses(packed, checkpoint, tmp_path / "ours"), losses)
    say(
        f"{VERSION}: loss before and after a step as launch.train's (to {difference:.0e}), "
        "6 steps resumed after 3 to the last bit"
    )


def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = case
    check_order(packed, tmp_path, numbers_read, make, checkpoint, tmp_path / "out")
    say(f"{VERSION}: order of packs kept on 1, 2 and 4 ranks")


def test_the_command_trains_and_saves(case: Any, tmp_path: Path) -> None:
    checkpoint, packed = case
    arguments = [str(packed), str(tmp_path), "--model", str(checkpoint), "--trainer", "trl"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    AutoModelForImageTextToText.from_pretrained(tmp_path)
