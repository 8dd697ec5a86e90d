"""Folders that are prepared for Energon: of packs in the layout people already have (`prompts`,
`img0.jpg`, no `meta`), and of samples that are no packs."""

import json
import multiprocessing
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.energon.flavors import BaseWebdatasetFactory

from tests.helpers.datasets import WORDS, dialogue, image_bytes
from tests.helpers.formats import tar_bytes, write_file
from tests.helpers.texts_and_images import random_image

DATASET_YAML = """\
sample_type:
  __module__: task_encoders.energon_samples
  __class__: PackedVQASample
part_filter: sample_loader.py:part_filter
sample_loader: sample_loader.py:sample_loader
"""
CRUDE_YAML = """\
__module__: megatron.energon
__class__: CrudeWebdataset
"""


def vqa_pack(rng: np.random.Generator, name: str, count: int) -> dict[str, bytes]:
    """Members of one pack of `count` sub-samples, as the VQA packers of others write it."""
    members = {
        f"img{i}.jpg": random_image(rng, 60 + 10 * i, 50 + 7 * i, orientation=1)
        for i in range(count)
    }
    record = {
        "images": list(members),
        "prompts": [f"<image>\nWhat is {i}?" for i in range(count)],
        "captions": [f"It is {i} in {name}." for i in range(count)],
    }
    return {**members, "json": json.dumps(record).encode()}


def write_folder(
    path: Path, shards: Sequence[Mapping[str, Mapping[str, bytes]]], dataset_yaml: str
) -> Path:
    """Tars of packs (key -> members), prepared by Energon's own preparation."""
    (path / ".nv-meta").mkdir(parents=True)
    names = [f"shard_{i}.tar" for i in range(len(shards))]
    for name, packs in zip(names, shards, strict=True):
        parts = (
            (f"{key}.{part}", data) for key, own in packs.items() for part, data in own.items()
        )
        write_file(path / name, tar_bytes(parts))
    with pytest.MonkeyPatch.context() as patch:
        # Its one worker is a thread here: to fork a process of gigabytes takes up to a second.
        patch.setattr(multiprocessing, "Process", threading.Thread)
        BaseWebdatasetFactory.prepare_dataset(
            path, names, split_parts_ratio=[("train", 1.0)], workers=1, shuffle_seed=None
        )
    (path / ".nv-meta" / "dataset.yaml").write_text(dataset_yaml)
    (path / ".nv-meta" / "sample_loader.py").write_text(
        "from task_encoders.energon_samples import part_filter, sample_loader  # noqa: F401\n"
    )
    return path


def legacy_vqa_folder(path: Path, dataset_yaml: str = DATASET_YAML, packs: int = 12) -> Path:
    rng = np.random.default_rng(0)
    members: list[tuple[str, Any]] = [
        (f"ps_{i:08d}", vqa_pack(rng, f"ps_{i:08d}", int(rng.integers(1, 4)))) for i in range(packs)
    ]
    half = packs // 2
    return write_folder(path, [dict(members[:half]), dict(members[half:])], dataset_yaml)


def text_folder(path: Path, num_packs: int) -> Path:
    """Packs of one short text each; a pack's key says its place."""
    record = json.dumps({"images": [[]], "prompt": [["Say it."]], "captions": [["It."]]}).encode()
    packs = {f"{i:02d}": {"json": record} for i in range(num_packs)}
    return write_folder(path, [packs], DATASET_YAML)


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


def words(rng: np.random.Generator, most: int = 60) -> str:
    return " ".join(rng.choice(WORDS, rng.integers(2, most)))


def picture(rng: np.random.Generator) -> bytes:
    width, height = (28 * int(side) for side in rng.integers(2, 8, 2))
    return image_bytes(width, height)


def crude_folder(path: Path, count: int, *, shards: int = 2) -> Path:
    """Dialogues with no picture, one, or two, in a folder declared as CrudeWebdataset; keys are
    numbers of five digits."""
    rng, members = np.random.default_rng(0), {}
    for number in range(count):
        names = [f"img{i}.jpg" for i in range(number % 3)]
        prompt = "<image>\n" * len(names) + words(rng)
        record = {"messages": dialogue(prompt, words(rng), words(rng), words(rng)), "images": names}
        media = {name: picture(rng) for name in names}
        members[f"{number:05d}"] = {**media, "json": json.dumps(record).encode()}
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
