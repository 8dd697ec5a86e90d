"""TRL's SFTTrainer on packs, and against what its own collator makes of the same samples."""

import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from trl import SFTConfig
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from launch.trainers.transformers_trainer import collate_packed
from launch.trainers.trl_trainer import PackedSFTTrainer
from offline_packing.demo.training import tiny_qwen2_vl
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import MEDIA_INPUTS, pixel_kwargs
from task_encoders.samples import IGNORE_INDEX, SourceSample
from task_encoders.text.pieces import to_chat
from tests.helpers.hf_trainers import (
    QUIET,
    check_branches,
    numbers_read,
    processor_of,
    recorded_run,
    video_files,
)
from tests.helpers.peers import assert_same, open_packs, stored_samples, token_losses_alone
from tests.helpers.shared_media import few_trees
from tests.peers import Say
from tests.peers.laws import PackingLaws, Rows, TrainingLaws
from tests.world import World

EXAMPLE = Path(__file__).parents[2] / "examples/trl_sft_trainer.py"
VERSION = f"TRL {trl.__version__}"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TEMPLATE = (TEMPLATES / "qwen2_5_vl_training.jinja").read_text()
END = 151645  # <|im_end|>
#: Fields that positions depend on.
PLACES = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")


def make(
    output: Path, model: Any, packs: Any, checkpoint: Path, **options: Any
) -> PackedSFTTrainer:
    args = SFTConfig(output_dir=str(output), bf16=False, **QUIET, **options)  # bf16 by default
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return PackedSFTTrainer(args=args, model=model, train_dataset=packs, processing_class=tokenizer)


def own_batch(
    processor: Any,
    sample: SourceSample,
    media: list[bytes],
    template: str = TEMPLATE,
    scratch: Path = Path(),
) -> Any:
    """A sample as TRL encodes it. `scratch` is for its videos."""
    num_images = len(sample.images)
    images = [Image().decode_example({"bytes": d, "path": None}) for d in media[:num_images]]
    if sample.task == "captioning":
        collator = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
        front = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
        caption = f"{sample.turns[0].answer}<|im_end|>"
        return collator([{"images": images, "prompt": front, "completion": caption}])
    collator = DataCollatorForVisionLanguageModeling(
        processor, assistant_only_loss=True, chat_template=template
    )
    messages, videos = to_chat(sample), iter(video_files(media[num_images:], scratch))
    for message in messages:
        if isinstance(message["content"], str):  # where TRL would look for room for the images
            message["content"] = [{"type": "text", "text": message["content"]}]
        for part in message["content"]:
            if part["type"] == "video":
                part["video"] = next(videos)
    return collator([{"images": images, "messages": messages}])


def expected_row(model: Any, batches: list[Any], end_token: int = END) -> dict[str, Any]:
    """Batches of one sample each, one after the other as packing has to put them."""
    tokens, labels, positions = [], [], []
    for batch in batches:
        # TRL keeps the newline after the last end token, and trains those after all of them,
        # which no model has to write.
        after_end = batch["input_ids"].roll(1) == end_token
        batch["labels"][after_end] = IGNORE_INDEX
        end = batch["input_ids"].shape[1] - int(after_end[0, -1])
        ids = batch["input_ids"][:, :end]
        types = batch["mm_token_type_ids"][:, :end]
        places = {name: batch[name] for name in PLACES if name in batch}
        found, _ = model.model.get_rope_index(ids, types, **places)
        positions.append(torch.cat([torch.arange(end)[None, None], found]))
        tokens.append(ids)
        labels.append(batch["labels"][:, :end])
    lengths = torch.tensor([0, *(ids.shape[1] for ids in tokens)])
    media = {name: [batch[name] for batch in batches if name in batch] for name in MEDIA_INPUTS}
    return {
        "input_ids": torch.cat(tokens, dim=1),
        "labels": torch.cat(labels, dim=1),
        "position_ids": torch.cat(positions, dim=2),
        "cu_seq_lens_q": lengths.cumsum(0),
        "max_length_q": int(lengths.max()),
        **{name: torch.cat(parts) for name, parts in media.items() if parts},
    }


class TestTraining(TrainingLaws):
    run = partial(recorded_run, make)
    read = partial(numbers_read, make)


class TestPacking(PackingLaws):
    def rows(self, packs: PackedFolder, task: str, folder: Path) -> Iterator[Rows]:
        vision = packs.task_encoder.encoder.options
        processor = builtin_processor(min_pixels=vision.min_pixels, max_pixels=vision.max_pixels)
        model, args = tiny_qwen2_vl(), SFTConfig(output_dir=str(folder), **QUIET)
        trainer = PackedSFTTrainer(
            args=args, model=model, train_dataset=packs, processing_class=processor.tokenizer
        )
        for row, pack in zip(trainer.get_train_dataloader(), packs, strict=True):
            batches = [own_batch(processor, *sample) for sample in stored_samples(pack)]
            yield trainer._prepare_inputs(row), expected_row(model, batches)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_packs_with_videos_hold_what_its_collator_makes_of_the_samples(
    family: str, case: Any, video_packs: Path, tmp_path: Path, say: Say
) -> None:
    """With the checkpoint's whole processor, which TRL's collator lets read the videos."""
    model = AutoModelForImageTextToText.from_pretrained(case[0])
    tokenizer = AutoTokenizer.from_pretrained(case[0])
    packs = open_packs(video_packs)
    processor = processor_of(family, packs.task_encoder.encoder, tokenizer)
    same = family.replace("qwen2_vl", "qwen2_5_vl")  # has the same template
    template = (TEMPLATES / f"{same}_training.jinja").read_text()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    num_videos = 0
    for number, pack in enumerate(packs):
        batches = [
            own_batch(processor, *sample, template, tmp_path) for sample in stored_samples(pack)
        ]
        row = collate_packed([{"packs": packs, "number": number}])
        row |= pixel_kwargs(row.pop("batch"))
        assert_same(row, expected_row(model, batches, end), f"{family} {number}")
        num_videos += len(row.get("video_grid_thw", ()))
    assert num_videos > 10
    say(
        f"{len(packs)} packs with {num_videos} videos hold what its collator makes of their samples"
    )


@pytest.mark.parametrize("option", ["packing", "padding_free"])
def test_packs_are_not_packed_again(option: str, case: Any, tmp_path: Path) -> None:
    checkpoint, packed = case
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    with pytest.raises(ValueError, match="set packing=False and padding_free=False"):
        make(tmp_path, model, open_packs(packed), checkpoint, **{option: True})


def test_samples_that_share_prefixes(world: World, tmp_path: Path, say: Say) -> None:
    checkpoint, trees, _ = few_trees(world, "qwen2_vl")
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    packs = open_packs(trees, trees=True)
    alone = [token_losses_alone(model, packs, number) for number in range(len(packs))]
    trainer = make(tmp_path, model, packs, checkpoint)
    say(check_branches(trainer, packs, torch.cat(alone).detach()))


def test_the_example_trains_and_saves(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, packed = case
    output = tmp_path / "run"
    options = ["--use_cpu", "--bf16", "false", "--report_to", "none", "--max_steps", "2"]
    monkeypatch.setattr("sys.argv", ["x", str(packed), str(checkpoint), str(output), *options])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    AutoModelForImageTextToText.from_pretrained(output)
