"""Folders that are prepared for Energon and hold no packs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.datasets import WORDS, dialogue, image_bytes
from tests.helpers.legacy_packs import CRUDE_YAML, write_folder

_TYPE = "sample_type: {{__module__: {}, __class__: {}}}\nfield_map: {{{}}}\n"
CAPTIONING_YAML = _TYPE.format("megatron.energon", "CaptioningSample", "image: jpg, caption: txt")
VQA_YAML = _TYPE.format(
    "megatron.energon",
    "VQASample",
    'image: jpg, context: "json[question]", answers: "json[answers]", '
    'answer_weights: "json[weights]"',
)
MESSAGES_YAML = _TYPE.format(
    "task_encoders.energon_samples",
    "MultiMixQASample",
    'image: jpg, messages: "json[messages]", system: "json[system]"',
)


def words(rng: np.random.Generator, least: int = 2, most: int = 60) -> str:
    return " ".join(rng.choice(WORDS, rng.integers(least, most)))


def picture(rng: np.random.Generator) -> bytes:
    width, height = (28 * int(side) for side in rng.integers(2, 8, 2))
    return image_bytes(width, height)


def crude_record(rng: np.random.Generator, number: int) -> dict[str, bytes]:
    """Members of a dialogue with no picture, one, or two."""
    num_images = number % 3
    names = [f"img{i}.jpg" for i in range(num_images)]
    prompt = "<image>\n" * num_images + words(rng)
    record = {"messages": dialogue(prompt, words(rng), words(rng), words(rng)), "images": names}
    return {name: picture(rng) for name in names} | {"json": json.dumps(record).encode()}


def crude_folder(path: Path, count: int, *, shards: int = 2, seed: int = 0) -> Path:
    """Dialogues in a folder declared as CrudeWebdataset; their keys are numbers of five digits."""
    rng = np.random.default_rng(seed)
    members = {f"{number:05d}": crude_record(rng, number) for number in range(count)}
    return folder_of(path, members, CRUDE_YAML, shards=shards)


def folder_of(
    path: Path, members: Mapping[str, Mapping[str, bytes]], yaml: str, *, shards: int = 1
) -> Path:
    """Samples (key -> members) in tars."""
    keys = np.array_split(list(members), shards)
    parts: list[Any] = [{str(key): members[str(key)] for key in part} for part in keys]
    return write_folder(path, parts, yaml)


def blend_of(
    path: Path,
    parts: Sequence[Path | str],
    *,
    epochs: int | None = None,
    splits: Sequence[str] = ("train",),
) -> Path:
    """Write a metadataset of parts: entries as they are, or folders, each with the same weight or
    repeated for `epochs`."""
    weight = "weight: 1" if epochs is None else f"repetitions: {epochs}"
    entries = [part if isinstance(part, str) else f"path: {part}, {weight}" for part in parts]
    kind = "blend_epochized" if "repetitions:" in entries[0] else "blend"
    lines = "".join(f"      - {{{entry}}}\n" for entry in entries)
    blends = "".join(f"  {split}:\n    {kind}:\n{lines}" for split in splits)
    path.write_text(f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n{blends}")
    return path
