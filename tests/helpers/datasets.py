"""Small real datasets on disk, and runs over them, for the tests of the pipeline."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from offline_packing.config.packing import PackingConfig, parse_config
from offline_packing.engines.local import LocalEngine
from offline_packing.index.table import Index, part_name
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan, summary_text
from offline_packing.runs.artifacts import StoredPlan, open_index, open_plan
from offline_packing.runs.run import Run
from offline_packing.write.write import write
from task_encoders.packs.manifest import Manifest

WORDS = "red green blue circle square above below left right of the a picture shows".split()


def image_bytes(
    width: int = 56, height: int = 56, image_format: str = "JPEG", shade: int = 0
) -> bytes:
    """A picture that depends on its size and shade only."""
    pixels = (np.indices((height, width)).sum(0)[..., None] * [1, 2, 3] + shade) % 251
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, image_format)
    return buffer.getvalue()


def png(width: int, height: int, rows: bytes, colours: int = 0) -> bytes:
    """Write rows as a PNG, which depends on no version of an encoder and may claim any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 0)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def dialogue(*texts: str) -> list[dict[str, str]]:
    """Messages of alternating user and assistant."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def captioning_pairs(root: Path, count: int = 40, seed: int = 0, first: int = 0) -> Path:
    """`count` pictures with a caption of 2 to 60 words each, in two folders; those before `first`
    are there already."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        stem = root / f"part{i % 2}" / f"{i:06d}"
        caption = " ".join(rng.choice(WORDS, rng.integers(2, 60)))
        width, height = (28 * int(n) for n in rng.integers(2, 8, 2))
        if i < first:
            continue
        write_json(stem.with_suffix(".json"), {"captions": [{"content": caption}]})
        if i % 3:
            stem.with_suffix(".jpg").write_bytes(image_bytes(width, height))
        else:
            stem.with_suffix(".png").write_bytes(image_bytes(width, height, "PNG"))
    return root


def mixed_pairs(root: Path, count: int = 30, seed: int = 0) -> Path:
    """Dialogues with no picture, one, or two."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        num_images, num_turns = i % 3, 1 + i % 4
        names = [f"{i:04d}_{j}.jpg" for j in range(num_images)]
        texts = [" ".join(rng.choice(WORDS, rng.integers(1, 40))) for _ in range(2 * num_turns)]
        texts[0] = "<image>\n" * num_images + texts[0]
        stem = f"{i:04d}" if names else f"output_{i:08d}"
        write_json(root / f"{stem}.json", {"messages": dialogue(*texts), "images": names})
        for name in names:
            (root / name).write_bytes(image_bytes(28 * (2 + i % 5), 84))
    return root


def vqa_pairs(root: Path, count: int = 24) -> Path:
    """One question on one picture each."""
    for i in range(count):
        question = f"<image>\nWhat is {'the ' * (i % 7)}colour?"
        write_json(root / f"{i}.json", {"messages": dialogue(question, "Red. " * (1 + i % 5))})
        (root / f"{i}.jpg").write_bytes(image_bytes(56 + 28 * (i % 4), 84))
    return root


#: What writes pairs for a task.
PAIRS = {"captioning": captioning_pairs, "vqa": vqa_pairs, "bmr": mixed_pairs}


def make_config(source: Any, folder: Path, /, **sections: dict[str, Any]) -> PackingConfig:
    """A configuration with small limits; a source that is a path is a folder of captions."""
    if isinstance(source, Path):
        source = {"format": "pairs", "path": str(source), "task": "captioning"}
    defaults: dict[str, dict[str, Any]] = {
        "model": {"max_pixels": 28 * 28 * 64},
        "pack": {"seq_length": 512},
        "output": {"path": str(folder), "packs_per_shard": 2},
        "engine": {"workers": 0, "samples_per_part": 16},
    }
    merged = {
        name: {**defaults.get(name, {}), **own} for name, own in (defaults | sections).items()
    }
    return parse_config({"source": source, **merged})


def config_file(path: Path, config: PackingConfig) -> Path:
    """A configuration on disk, in which a lone source is an object."""
    content = config.model_dump(mode="json", exclude_unset=True)
    if len(content["source"]) == 1:
        (content["source"],) = content["source"]
    write_json(path, content)
    return path


def make_run(source: Any, folder: Path, /, **sections: dict[str, Any]) -> Run:
    """A run in this process unless engine.workers says otherwise."""
    config = make_config(source, folder, **sections)
    return Run(config, LocalEngine(config.engine.workers))


def plan_index(run: Run) -> StoredPlan:
    """plan, with the index as it is on disk."""
    return plan(run, open_index(run))


def write_planned(run: Run) -> Manifest:
    """write, with index and plan as they are on disk."""
    return write(run, open_index(run), open_plan(run))


def plan_summary(run: Run) -> str:
    """The lines that `plan` prints."""
    made = plan_index(run)
    return summary_text(run, open_index(run), made.packs, made.set_aside)


def pack_all(run: Run) -> Manifest:
    """measure, plan, write; returns the manifest."""
    samples = measure(run)
    return write(run, samples, plan(run, samples))


def packed_run(source: Any, folder: Path, /, **sections: dict[str, Any]) -> Run:
    """A run that is packed already."""
    run = make_run(source, folder, **sections)
    pack_all(run)
    return run


def outcomes(run: Run) -> dict[str, str]:
    """Measure; key -> 'ok' or the reason for which the sample was set aside."""
    info = measure(run).info
    aside = [
        row
        for number in range(len(info.part_rows))
        for row in pq.read_table(run.workspace.set_aside / part_name(number)).to_pylist()
    ]
    keys = Index(run.workspace.index, info).table("key")["key"].to_pylist()
    assert len(keys) == info.num_samples
    assert len(aside) == info.num_set_aside
    return {row["key"]: row["reason"] for row in aside} | dict.fromkeys(keys, "ok")


def index_rows(run: Run) -> list[dict[str, Any]]:
    """All rows of a complete index."""
    return open_index(run).table().to_pylist()
