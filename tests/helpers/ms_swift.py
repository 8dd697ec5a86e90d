"""ms-swift's templates, with and without our plugin, and what they make of samples."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image, ImageOps
from swift.arguments import SftArguments
from swift.pipelines.train.sft import SwiftSft
from swift.template import get_template
from swift.utils import import_external_file

from task_encoders.samples import SourceSample, place_media
from tests.helpers.hf_trainers import use_segment_attention
from tests.helpers.hf_videos import video_files

PLUGIN = Path(__file__).parents[2] / "launch/trainers/ms_swift.py"
LENGTH = {"return_length": True}


def make_template(model: Any, processor: Any, family: str, **options: Any) -> Any:
    """A template that packs, for a tokenizer of any vocabulary."""
    template = get_template(processor, template_type=family, **options)
    template.set_mode("train")
    template.model = model
    template.packing = template.padding_free = True
    template.image_token_id = model.config.image_token_id
    template.video_token_id = model.config.video_token_id
    return template


def packs_of_plugin(template: Any, model_dir: str, packed: Path, split: str = "train") -> Any:
    """Packs for that template, which the plugin changes as it does a pipeline's."""
    import_external_file(str(PLUGIN))
    plugin: Any = sys.modules[SwiftSft._prepare_dataset.__module__]
    args = SimpleNamespace(packing=True, model_dir=model_dir)
    return plugin.packs_for(SimpleNamespace(args=args, template=template), str(packed), split)


def assistant(text: str) -> dict[str, str]:
    """A message."""
    return {"role": "assistant", "content": text}


def own_sample(
    template: Any,
    sample: SourceSample,
    media: list[bytes],
    limits: dict[str, int],
    scratch: Path = Path(),
) -> dict[str, Any]:
    """A sample as ms-swift encodes it, except for the newline that it trains after every answer.

    Args:
        limits: min_pixels and max_pixels, which it takes from the environment, once, otherwise.
        scratch: for videos.
    """
    count = len(sample.images)
    # It does not turn images upright by their EXIF orientation.
    images = [ImageOps.exif_transpose(Image.open(io.BytesIO(data))) for data in media[:count]]
    videos = video_files(media[count:], scratch)
    given = {"images": images, "videos": videos, "chat_template_kwargs": limits}
    if sample.task == "captioning":
        caption = "<image>" * len(images) + sample.turns[0].answer
        return template.encode({"messages": [assistant(caption)], **given}, **LENGTH)
    messages = [] if sample.system is None else [{"role": "system", "content": sample.system}]
    for turn in place_media(sample):
        messages += [{"role": "user", "content": turn.prompt}, assistant(turn.answer)]
    encoded: dict[str, Any] = template.encode({"messages": messages, **given}, **LENGTH)
    end, (newline,) = template.tokenizer.eos_token_id, template.tokenizer.encode("\n")
    assert encoded["input_ids"][-2:] == [end, newline] == encoded["labels"][-2:]
    tokens = encoded["input_ids"]
    pairs = zip([None, *tokens], tokens, encoded["labels"], strict=False)
    encoded["labels"] = [-100 if before == end else label for before, _, label in pairs][:-1]
    encoded["input_ids"] = tokens[:-1]
    if "mm_token_type_ids" in encoded:
        encoded["mm_token_type_ids"] = encoded["mm_token_type_ids"][:-1]
    return encoded | {"length": len(encoded["input_ids"])}


class CPUArguments(SftArguments):
    """Without the check for flash attention."""

    def _check_padding_free(self) -> None:
        self.padding_free = True


class Pipeline(SwiftSft):
    """Stops at the trainer."""

    args_class = CPUArguments

    def train(self, trainer: Any) -> Any:
        return trainer


def make_trainer(
    checkpoint: Path, packed: Path, output: Path, *, model_type: str, template: str, **options: Any
) -> Any:
    """ms-swift's trainer as `swift sft` makes it from its arguments, on a CPU."""
    import_external_file(str(PLUGIN))
    args = CPUArguments(
        model=str(checkpoint),
        model_type=model_type,
        template=template,
        dataset=[str(packed)],
        output_dir=str(output),
        add_version=False,
        packing=True,
        attn_impl="sdpa",
        torch_dtype="float32",
        tuner_type="full",
        freeze_vit=False,
        freeze_aligner=False,
        train_dataloader_shuffle=False,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        warmup_ratio=0.0,
        weight_decay=0.0,
        dataloader_num_workers=0,
        logging_steps=1,
        report_to=["none"],
        use_cpu=True,
        **options,
    )
    pipeline = Pipeline(args)
    use_segment_attention(pipeline.model)
    return pipeline.run()
