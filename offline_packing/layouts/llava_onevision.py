"""Shards as the trainers of LLaVA-OneVision-1.5 and of LLaVA-OneVision-2 read them.

    train-000000.tar     KEY.img0.jpg, KEY.img1.jpg, ..., KEY.json
    KEY.json             {"images": ["img0.jpg", ...], "prompts": [str, ...], "captions": [...]}
    .nv-meta/.info.yaml  their Energon (5.0) does not read the .json

For 1.5, one image and one turn per sub-sample. For 2, any number of both: member `img{i}_{j}.jpg`
is image j of sub-sample i, and the lists are nested. `.jpg` whatever the image's format, and no
system message. Their loaders drop a whole pack for one unusable sub-sample, and train some
sub-samples differently; `admit` finds both. They do not turn images upright by their EXIF
orientation; the number of tokens is the same.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import orjson

from offline_packing.errors import StageError
from offline_packing.layouts.base import Layout, Member
from offline_packing.layouts.energon_metadata import metadata_of_5_0
from offline_packing.layouts.shards import PlannedSample, ShardTask
from offline_packing.layouts.unfit import (
    Model,
    Rule,
    Sizes,
    begins_with_break,
    first_broken,
    has_control_elsewhere,
    has_control_text,
    has_own_system,
    has_small_image,
    has_thin_image,
    is_not_plain,
)
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack_format import JSON_PART
from task_encoders.samples import IMAGE_PLACEHOLDER, SourceSample, Turn, place_media

_SAMPLE_LOADER: Final = '''"""What Energon reads of a pack."""


def part_filter(part):
    return True


def sample_loader(parts):
    record = parts["json"]
    return {
        "__key__": parts["__key__"],
        "images": [IMAGES],
        "captions": record["captions"],
        "prompts": record["prompts"],
    }
'''

_RULES: Final[Sequence[Rule]] = (
    ("sample without exactly one image", lambda sample, _: len(sample.images) != 1),
    ("video", lambda sample, _: bool(sample.videos)),
    ("sample of several turns", lambda sample, _: len(sample.turns) != 1),
    # Their packs have no place for it.
    ("system message", has_own_system),
    ("tools, thoughts, or answers without loss or end token", is_not_plain),
    # They render the template to one string, put an image for each <image> in it, and tokenize it
    # with its special tokens: one image too many loses the pack, others change its tokens.
    ("text that spells control tokens, nor <image> in an answer or document", has_control_text),
    # transformers 4.53 takes the rows of such an image for its channels.
    ("image 1 or 3 pixels high or wide", has_thin_image),
)
_RULES_2: Final[Sequence[Rule]] = (
    ("video file: give its frames as images", lambda sample, _: bool(sample.videos)),
    ("system message", has_own_system),
    ("tools, thoughts, or answers without loss or end token", is_not_plain),
    # Its `_normalize_image_backed_video_placeholders` puts all images in place of a <video>.
    ("text that spells control tokens, nor <image> in an answer", has_control_text),
    ("such text elsewhere, nor <video>", has_control_elsewhere),
    # It tokenizes an answer apart from its header.
    ("answer that begins with a line break", begins_with_break),
    # Its `_preprocess_image` stretches such an image before the processor resizes it.
    ("image less than 28 pixels high or wide", has_small_image),
)


class LlavaOneVisionLayout(Layout):
    """Tar shards with the member names and metadata that LLaVA-OneVision-1.5's trainers expect."""

    TASKS: ClassVar[Sequence[str]] = ("captioning", "vqa")
    #: the images of a pack, in `_SAMPLE_LOADER`
    IMAGES: ClassVar[str] = 'parts[name] for name in record["images"]'
    RULES: ClassVar[Sequence[Rule]] = _RULES

    def check(self, task: str, family: str) -> None:
        if task not in self.TASKS:
            raise ValueError(
                f"holds {' and '.join(self.TASKS)} only, not {task}; choose another layout"
            )

    def unfit(self, sample: SourceSample, sizes: Sizes, model: Model) -> str | None:
        return first_broken(self.RULES, sample, sizes)

    def members(self, task: ShardTask, samples: Sequence[PlannedSample]) -> list[Member]:
        stored = [self.stored_form(task.read_sample(sample)) for sample in samples]
        images = [data for one in samples for data in task.read_media(one, one.media)]
        record = self.fields(stored)
        names = itertools.chain(*([n] if isinstance(n, str) else n for n in record["images"]))
        meta = {  # our own field
            "task": task.task,
            "keys": [sample.key for sample in samples],
            "num_tokens": [sample.num_tokens for sample in samples],
        }
        data = orjson.dumps(record | {"meta": meta})
        return [*zip(names, images, strict=True), (JSON_PART, data)]

    def fields(self, stored: Sequence[SourceSample]) -> dict[str, Any]:
        """Return their fields of a pack's JSON, which names the images of all samples."""
        return {
            "images": [f"img{i}.jpg" for i in range(len(stored))],
            "prompts": [one.turns[0].prompt for one in stored],
            "captions": [one.turns[0].answer for one in stored],
        }

    def stored_form(self, sample: SourceSample) -> SourceSample:
        """Mark the image's place in the prompt, as their loader expects it. Raises StageError if
        the sample is not the one that was measured and planned."""
        if len(sample.turns) != 1:
            raise StageError(
                f"sample {sample.key!r} changed since it was measured: it has {len(sample.turns)} "
                "turns, was 1; restore it, or pack again with another output.path"
            )
        prompt, answer = sample.turns[0].prompt, sample.turns[0].answer
        if sample.task == "vqa" and IMAGE_PLACEHOLDER not in prompt:
            prompt = IMAGE_PLACEHOLDER + prompt
        return replace(sample, turns=(Turn(prompt, answer),), system=None)

    def metadata(self, manifest: Manifest) -> dict[str, bytes]:
        dataset = {
            "sample_type": {
                "__module__": "aiak_training_llm.data.multimodal",
                "__class__": "PackedCaptioningSample",
            },
            "part_filter": "sample_loader.py:part_filter",
            "sample_loader": "sample_loader.py:sample_loader",
        }
        loader = _SAMPLE_LOADER.replace("IMAGES", self.IMAGES)
        return {"sample_loader.py": loader.encode(), **metadata_of_5_0(dataset, manifest)}


class LlavaOneVision2Layout(LlavaOneVisionLayout):
    """The same for LLaVA-OneVision-2, as its `s4_bins_to_webdataset.py` writes packs: images that
    its trainer reads with OFFLINE_PACKING_BMR=1. Captions have no form there."""

    TASKS: ClassVar[Sequence[str]] = ("vqa", "bmr")
    RULES = _RULES_2
    IMAGES = """
            [parts[f"img{i}_{j}.jpg"] for j in range(len(names))]
            for i, names in enumerate(record["images"])
        """

    def refuse(self, model: Model) -> None:
        if "chat_template" in model:
            raise StageError(
                "the chat template of model.processor, or model.template_options, writes something "
                "else than the template qwen2-vl, which LLaVA-OneVision-2's trainer writes; remove "
                "it from the checkpoint's folder, or choose output.layout=energon"
            )

    def fields(self, stored: Sequence[SourceSample]) -> dict[str, Any]:
        names = [
            [f"img{i}_{j}.jpg" for j in range(len(one.images))] for i, one in enumerate(stored)
        ]
        return {
            "images": names,
            "prompts": [[turn.prompt for turn in one.turns] for one in stored],
            "captions": [[turn.answer for turn in one.turns] for one in stored],
            "sample_count": len(stored),
            "patch_positions": [[""] * len(own) for own in names],
            "timestamp_decimal": [1] * len(stored),
        }

    def stored_form(self, sample: SourceSample) -> SourceSample:
        return replace(sample, turns=place_media(sample), system=None)
