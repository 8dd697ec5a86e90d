"""Shards as LoongForge reads them, through its Energon (5.0).

    train-000000.tar     as in the energon layout, with three more fields in KEY.json:
    KEY.json             {"messages": [{"messages": [{"role", "content"}, ...], "tools"}, ...],
                          "media_files": [["img000.jpg"], ...], "media_type": "image", ...}
    .nv-meta/.info.yaml  its Energon does not read the .json

It reads them as `packed_chat_mix`, in its phase sft. Packs have media of one type in all their
samples, or none: it drops a pack where one sample has no image, and one that becomes longer than
its `--seq-length`. `added_tokens` leaves room for the tokens it adds.

Captions are `packed_captioning`, in its phase pretrain: the llava_onevision layout's members.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from offline_packing.layouts.base import Layout, Member
from offline_packing.layouts.energon_metadata import metadata_of_5_0
from offline_packing.layouts.llava_onevision import LlavaOneVisionLayout
from offline_packing.layouts.shards import PlannedSample, ShardTask
from offline_packing.layouts.unfit import (
    Grids,
    Model,
    Rule,
    Sizes,
    begins_with_break,
    first_broken,
    has_control_elsewhere,
    has_control_text,
    has_empty_system,
    has_small_image,
    is_untrained_or_has_roles,
)
from task_encoders.families import FAMILIES
from task_encoders.families.qwen3_vl import QWEN3_5
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack import restore_pack
from task_encoders.packs.pack_format import JSON_PART, is_video_name
from task_encoders.samples import SampleError, SourceSample, place_media
from task_encoders.text.pieces import to_messages

_CAPTIONS: Final = LlavaOneVisionLayout()
_RULES: Final[Sequence[Rule]] = (
    ("sample with images and videos", lambda sample, _: bool(sample.images and sample.videos)),
    # LoongForge renders the template to one string and tokenizes that.
    ("text that spells control tokens, nor <image> in an answer", has_control_text),
    ("such text elsewhere, nor <video> without a video", has_control_elsewhere),
    # It trains every answer, and knows a first system message, users, assistants and tools.
    (
        "answer untrained or cut, nor system or developer message further on",
        is_untrained_or_has_roles,
    ),
    # It takes an empty one for none.
    ("empty system message", has_empty_system),
    # It refuses a token that is half the header's.
    ("answer that begins with a line break", begins_with_break),
    # It stretches such an image before it resizes it.
    ("image less than 28 pixels high or wide", has_small_image),
)
#: Extensions of videos that its Energon leaves undecoded, and of the same containers ones it knows.
_READ_AS: Final = {"m4v": "mp4", "3gp": "mp4", "mkv": "webm"}
#: Pixels to whose multiples it resizes every image. Where a token of the family has another side,
#: it resizes images a second time, to multiples of that, and takes frames of videos twice.
_SIDE: Final = 28


class LoongForgeLayout(Layout):
    """Tar shards whose packs also hold LoongForge's fields."""

    ONE_MEDIUM = True

    def check(self, task: str, family: str) -> None:
        if family == QWEN3_5.name:
            raise ValueError(
                f"holds no packs of {family}: LoongForge writes an empty thought before the "
                "answers of every turn; choose energon, and another trainer"
            )

    def unfit(self, sample: SourceSample, sizes: Sizes, model: Model) -> str | None:
        if sample.task == "captioning":
            return _CAPTIONS.unfit(sample, sizes, model)
        rules, family = list(_RULES), model.get("family")
        if _token_side(model) != _SIDE:
            rules.insert(1, (f"video for {family}", lambda sample, _: bool(sample.videos)))
        return first_broken(rules, sample, sizes)

    def added_tokens(self, sample: SourceSample, grids: Grids, model: Model) -> int:
        if sample.task == "captioning":
            return 0
        added, side = 1, _token_side(model)  # its templates *-hf keep the last answer's newline
        if grids and side != _SIDE:
            added += int(_room_of_images(np.array(grids), model["min_pixels"] / side**2).sum())
        return added

    def members(self, task: ShardTask, samples: Sequence[PlannedSample]) -> list[Member]:
        if task.task == "captioning":
            return _CAPTIONS.members(task, samples)
        read_as = [
            replace(one, extensions=tuple(_READ_AS.get(name, name) for name in one.extensions))
            for one in samples
        ]
        *media, (_, packed) = super().members(task, read_as)
        stored = []
        for sample in restore_pack(packed, "").sub_samples:
            if isinstance(sample, SampleError):
                raise sample  # planned, so it was fit
            stored.append(sample)
        kinds = {"video" if is_video_name(name) else "image" for name, _ in media}
        fields = {
            "messages": list(map(_conversation, stored)),
            "media_files": [list(sample.media) for sample in stored],
            "media_type": min(kinds, default="text"),  # there is one at most: ONE_MEDIUM
        }
        return [*media, (JSON_PART, orjson.dumps(orjson.loads(packed) | fields))]

    def stored_form(self, sample: SourceSample) -> SourceSample:
        return _CAPTIONS.stored_form(sample) if sample.task == "captioning" else sample

    def metadata(self, manifest: Manifest) -> dict[str, bytes]:
        task = manifest.task
        sample_type = "packed_captioning" if task == "captioning" else "packed_chat_mix"
        dataset = {
            "__module__": "megatron.energon",
            "__class__": "CrudeWebdataset",
            "subflavors": {"sample_type": sample_type, "offline_packing": task},
        }
        return metadata_of_5_0(dataset, manifest)


def _token_side(model: Model) -> int:
    """Return the pixels of a token's side; `_SIDE` where lengths were given by the user."""
    build = FAMILIES[model["family"]].build if "family" in model else None
    return 2 * int(getattr(build, "PATCH_SIZE", _SIDE // 2))


def _room_of_images(grids: npt.NDArray[np.integer], smallest: float) -> npt.NDArray[np.integer]:
    """Return (num_images,) tokens that images may gain if they are resized to multiples of 28
    pixels before multiples of 32: one row and column; half if they must grow to the `smallest`
    number of tokens. `grids` (num_images, 3) are in patches, two by two per token."""
    sides = grids[:, 1:].astype(np.int64) // 2
    tokens = sides.prod(1)
    return sides.sum(1) + 1 + np.where(tokens <= 1.25 * smallest, tokens // 2, 0)


def _conversation(sample: SourceSample) -> dict[str, Any]:
    """Return a sample as messages, with placeholders in the texts, and its tools."""
    placed = replace(sample, turns=place_media(sample))
    tools = {"tools": json.loads(sample.tools)} if sample.tools else {}
    return {"messages": to_messages(placed), **tools}
