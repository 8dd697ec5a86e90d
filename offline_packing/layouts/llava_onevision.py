"""Shards as the trainers of LLaVA-OneVision-1.5 read them.

    train-000000.tar     KEY.img0.jpg, KEY.img1.jpg, ..., KEY.json
    KEY.json             {"images": ["img0.jpg", ...], "prompts": [str, ...], "captions": [...]}
    .nv-meta/.info.yaml  their Energon (5.0) does not read the .json

One image and one turn per sub-sample, `.jpg` whatever the image's format, and no system message.
Their loader drops a whole pack for one unusable sub-sample, and trains some sub-samples
differently; `admit` finds both. It does not turn images upright by their EXIF orientation; the
number of tokens is the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
import orjson

from offline_packing.errors import StageError
from offline_packing.index.measured import Trait
from offline_packing.index.table import Index
from offline_packing.layouts.base import Admission, Member
from offline_packing.layouts.energon import EnergonLayout
from offline_packing.layouts.shards import PlannedSample, ShardTask
from offline_packing.storage.files import write_atomically
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack_format import JSON_PART
from task_encoders.samples import IMAGE_PLACEHOLDER, SourceSample, Turn

_SAMPLE_LOADER: Final = '''"""What Energon reads of a pack."""


def part_filter(part):
    return True


def sample_loader(parts):
    record = parts["json"]
    return {
        "__key__": parts["__key__"],
        "images": [parts[name] for name in record["images"]],
        "captions": record["captions"],
        "prompts": record["prompts"],
    }
'''

_UNFIT_TRAITS: Final[Mapping[Trait, str]] = {
    # Their packs have no place for it.
    Trait.OWN_SYSTEM: "system message",
    Trait.NOT_PLAIN: "tools, thoughts, or answers without loss or end token",
    # They render the template to one string, put an image for each <image> in it, and tokenize it
    # with its special tokens: one image too many loses the pack, others change its tokens.
    Trait.CONTROL_TEXT: "text that spells control tokens, nor <image> in an answer or document",
    # transformers 4.53 takes the rows of such an image for its channels.
    Trait.THIN_IMAGE: "image 1 or 3 pixels high or wide",
}


class LlavaOneVisionLayout(EnergonLayout):
    """Tar shards with the member names and metadata that LLaVA-OneVision-1.5's trainers expect."""

    TASKS: ClassVar[Sequence[str]] = ("captioning", "vqa")
    TOKEN_IDS = "never"
    OWN_JSON = False
    HOLDS_UNTRAINED = False
    NEEDS_TRAITS = True
    METADATA: ClassVar[Sequence[str]] = (*EnergonLayout.METADATA, ".nv-meta/.info.yaml")

    def admit(self, samples: Index) -> Admission:
        traits = traits_of(samples)
        unfit = {
            "sample without exactly one image": samples.array("num_images") != 1,
            "video": samples.array("num_videos"),
            "sample of several turns": samples.array("num_turns") != 1,
            **{what: traits & trait for trait, what in _UNFIT_TRAITS.items()},
        }
        return Admission([(what, np.flatnonzero(found)) for what, found in unfit.items()])

    def members(self, task: ShardTask, samples: Sequence[PlannedSample]) -> list[Member]:
        stored = [self.stored_form(task.read_sample(sample)) for sample in samples]
        images = [task.read_media(sample, sample.media)[0] for sample in samples]
        names = [f"img{i}.jpg" for i in range(len(samples))]
        record = {
            "images": names,
            "prompts": [one.turns[0].prompt for one in stored],
            "captions": [one.turns[0].answer for one in stored],
            "meta": {
                "task": task.task,
                "keys": [sample.key for sample in samples],
                "num_tokens": [sample.num_tokens for sample in samples],
            },
        }
        return [*zip(names, images, strict=True), (JSON_PART, orjson.dumps(record))]

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

    def finish(self, folder: Path, manifest: Manifest, fragments: Sequence[Path]) -> None:
        super().finish(folder, manifest, fragments)
        dataset = {
            "sample_type": {
                "__module__": "aiak_training_llm.data.multimodal",
                "__class__": "PackedCaptioningSample",
            },
            "part_filter": "sample_loader.py:part_filter",
            "sample_loader": "sample_loader.py:sample_loader",
        }
        write_atomically(folder / ".nv-meta/sample_loader.py", _SAMPLE_LOADER.encode())
        self.describe_anew(folder, dataset, manifest)


def traits_of(samples: Index) -> npt.NDArray[np.uint8]:
    """(num_samples,) the traits. Raises StageError if they were not measured."""
    traits = samples.table("traits")["traits"]
    if traits.null_count:
        raise StageError(
            "the index was measured for a layout that does not need the traits of samples; run "
            "measure again with output.overwrite=true, or choose another output.path"
        )
    return traits.to_numpy()
