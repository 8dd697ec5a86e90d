"""Pack folders in the layout people already have: `prompts`, `img0.jpg`, no `meta`."""

import io
import json
import multiprocessing
import tarfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.energon.flavors import BaseWebdatasetFactory

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
        with tarfile.open(path / name, "w") as tar:
            for key, members in packs.items():
                for part, data in members.items():
                    info = tarfile.TarInfo(f"{key}.{part}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
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


def text_folder(path: Path, num_packs: int, first: int = 0) -> Path:
    """Packs of one short text each; a pack's key says its place, from `first` on."""
    record = {"images": [[]], "prompt": [["Say it."]], "captions": [["It."]]}
    packs = {
        f"{i:02d}": {"json": json.dumps(record).encode()} for i in range(first, first + num_packs)
    }
    return write_folder(path, [packs], DATASET_YAML)
