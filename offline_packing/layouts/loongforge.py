"""Shards as LoongForge reads them, as `packed_chat_mix`, through its Energon (5.0).

    train-000000.tar     as in the energon layout, with three more fields in KEY.json:
    KEY.json             {"messages": [{"messages": [{"role", "content"}, ...], "tools"}, ...],
                          "media_files": [["img000.jpg"], ...], "media_type": "image" | "text"}
    .nv-meta/.info.yaml  its Energon does not read the .json

Tools need one of its `*-hf` chat templates. A pack has media of one type, and each of its samples
has some; `find_unfit` finds those that have not.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import orjson
import yaml

from offline_packing.index.measured import Trait
from offline_packing.index.rows import SampleIds
from offline_packing.index.table import Index
from offline_packing.layouts.base import Member
from offline_packing.layouts.energon import EnergonLayout
from offline_packing.layouts.shard_tasks import Row, ShardTask
from offline_packing.storage.files import write_atomically
from task_encoders.pack_format import JSON_PART, restore_pack
from task_encoders.samples import SampleError, SourceSample
from task_encoders.text.pieces import place_media, to_messages

_UNFIT_TRAITS: Final[Mapping[Trait, str]] = {
    # It renders the template to one string and tokenizes that.
    Trait.CONTROL_TEXT: "text that spells control tokens, nor <image> in an answer",
    # It trains every answer, and knows a first system message, users, assistants and tools.
    Trait.UNTRAINED_OR_ROLES: "answer without loss, nor system or developer message further on",
    Trait.THIN_IMAGE: "image 1 or 3 pixels high or wide",
}


class LoongForgeLayout(EnergonLayout):
    """Tar shards whose packs also hold LoongForge's fields."""

    TASKS: ClassVar[Sequence[str]] = ("vqa", "bmr")
    METADATA: ClassVar[Sequence[str]] = (*EnergonLayout.METADATA, ".nv-meta/.info.yaml")

    def find_unfit(self, samples: Index) -> Iterator[tuple[str, SampleIds]]:
        yield "video", np.flatnonzero(samples.array("num_videos"))
        num_images = samples.array("num_images")
        if num_images.any():
            yield "sample without an image among others", np.flatnonzero(num_images == 0)
        traits = samples.array("traits")
        for trait, what in _UNFIT_TRAITS.items():
            yield what, np.flatnonzero(traits & trait)

    def members(self, task: ShardTask, rows: Sequence[Row]) -> list[Member]:
        *media, (_, packed) = super().members(task, rows)
        samples = []
        for sample in restore_pack(packed, "").sub_samples:
            if isinstance(sample, SampleError):
                raise sample  # planned, so it was fit
            samples.append(sample)
        fields = {
            "messages": list(map(_conversation, samples)),
            "media_files": [list(sample.images) for sample in samples],
            "media_type": "image" if media else "text",
        }
        return [*media, (JSON_PART, orjson.dumps(orjson.loads(packed) | fields))]

    def finish(self, folder: Path, manifest: Mapping[str, Any], fragments: Sequence[Path]) -> None:
        super().finish(folder, manifest, fragments)
        meta = folder / ".nv-meta"
        dataset = {
            "__module__": "megatron.energon",
            "__class__": "CrudeWebdataset",
            "subflavors": {"sample_type": "packed_chat_mix", "offline_packing": manifest["task"]},
        }
        counts = {shard["name"]: shard["packs"] for shard in manifest["shards"]}
        info = yaml.safe_dump({"shard_counts": counts}, sort_keys=False)
        write_atomically(meta / "dataset.yaml", yaml.safe_dump(dataset, sort_keys=False).encode())
        write_atomically(meta / ".info.yaml", info.encode())


def _conversation(sample: SourceSample) -> dict[str, Any]:
    """A sample as messages, with placeholders in the texts, and its tools."""
    placed = replace(sample, turns=place_media(sample))
    tools = {"tools": json.loads(sample.tools)} if sample.tools else {}
    return {"messages": to_messages(placed), **tools}
