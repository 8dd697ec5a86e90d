"""Shards as the trainers of LLaVA-OneVision-1.5 read them.

    train-000000.tar     KEY.img0.jpg, KEY.img1.jpg, ..., KEY.json
    KEY.json             {"images": ["img0.jpg", ...], "prompts": [str, ...], "captions": [...]}
    .nv-meta/.info.yaml  their Energon (5.0) does not read the .json

One image and one turn per sub-sample, `.jpg` whatever the image's format, and no system message.
Their loader drops the whole pack for one sub-sample that it cannot use, so such samples are refused
here. It does not turn images upright by their EXIF orientation; the number of tokens is the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

import orjson
import yaml

from offline_packing.errors import StageError
from offline_packing.files import write_atomically
from offline_packing.fragments import ShardFragments
from offline_packing.layouts.base import Member
from offline_packing.layouts.energon import EnergonLayout
from offline_packing.shard_tasks import Row, ShardTask
from task_encoders.pack_format import JSON_PART
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


class LlavaOneVisionLayout(EnergonLayout):
    """Tar shards with the member names and metadata of those trainers."""

    TASKS: ClassVar[Sequence[str]] = ("captioning", "vqa")
    ONE_IMAGE_ONE_TURN: ClassVar[bool] = True

    def members(self, task: ShardTask, rows: Sequence[Row]) -> list[Member]:
        samples = [self.stored_form(task.read_sample(row)) for row in rows]
        images = [task.read_media(row)[0] for row in rows]
        names = [f"img{i}.jpg" for i in range(len(rows))]
        record = {
            "images": names,
            "prompts": [sample.turns[0].prompt for sample in samples],
            "captions": [sample.turns[0].answer for sample in samples],
            "meta": {
                "task": task.task,
                "keys": [row.key for row in rows],
                "num_tokens": [row.num_tokens for row in rows],
            },
        }
        return [*zip(names, images, strict=True), (JSON_PART, orjson.dumps(record))]

    def stored_form(self, sample: SourceSample) -> SourceSample:
        """With the image's place in the prompt, as their loader wants it.

        Raises:
            StageError: their loader cannot use the sample.
        """
        (turn,) = sample.turns
        if sample.system is not None or IMAGE_PLACEHOLDER in turn.answer:
            what = f"{IMAGE_PLACEHOLDER!r} in its answer" if sample.system is None else "a system"
            raise StageError(
                f"sample {sample.key!r} has {what} text, which output.layout=llava_onevision "
                "cannot hold; take it out of the source, or choose layout energon"
            )
        prompt = turn.prompt
        if sample.task == "vqa" and IMAGE_PLACEHOLDER not in prompt:
            prompt = IMAGE_PLACEHOLDER + prompt
        return replace(sample, turns=(Turn(prompt, turn.answer),))

    def finish(
        self,
        folder: Path,
        task: str,
        splits: Mapping[str, Sequence[str]],
        fragments: ShardFragments,
        content_hash: str,
    ) -> None:
        super().finish(folder, task, splits, fragments, content_hash)
        meta = folder / ".nv-meta"
        dataset = {
            "sample_type": {
                "__module__": "aiak_training_llm.data.multimodal",
                "__class__": "PackedCaptioningSample",
            },
            "part_filter": "sample_loader.py:part_filter",
            "sample_loader": "sample_loader.py:sample_loader",
        }
        counts = {fragment.name: fragment.num_packs for fragment in fragments}
        write_atomically(meta / "sample_loader.py", _SAMPLE_LOADER.encode())
        write_atomically(meta / "dataset.yaml", yaml.safe_dump(dataset, sort_keys=False).encode())
        info = yaml.safe_dump({"shard_counts": counts}, sort_keys=False)
        write_atomically(meta / ".info.yaml", info.encode())
