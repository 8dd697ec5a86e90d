"""LoongForge on packs of its layout: its loader, cookers and task encoder, up to the batch.

It is not a package: LOONGFORGE names a checkout of github.com/baidu-baige/LoongForge.
"""

import io
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLProcessor, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from offline_packing.demo.generate import generate_demo_dataset
from offline_packing.demo.run import MODEL, SEQ_LENGTH, SOURCES
from offline_packing.storage.files import read_json
from task_encoders.families import build_sample_encoder, model_options
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packs.pack import restore_pack
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX, SourceSample
from task_encoders.text.qwen_templates import QWEN3_VL_TEMPLATE
from task_encoders.text.qwen_vocabulary import QWEN3_TEXT_TOKENS
from tests.helpers import loongforge
from tests.helpers.datasets import dialogue, image_bytes, write_json
from tests.helpers.layout_readers import (
    REPOSITORY,
    batches_by_key,
    is_turned,
    pack_by_command,
    pictures,
)
from tests.helpers.loongforge import tool_dialogues
from tests.helpers.tiny_tokenizers import save_with_template, tiny_tokenizer
from tests.helpers.videos import make_video
from tests.peers import Say

if not os.environ.get("LOONGFORGE"):
    pytest.skip("LOONGFORGE=DIR names no checkout of LoongForge", allow_module_level=True)
loongforge.install(Path(os.environ["LOONGFORGE"]).resolve())

VERSION = f"LoongForge on energon {version('megatron-energon')}"
PIXELS = {"min_pixels": 4096, "max_pixels": 32_768}


class Compared(NamedTuple):
    """Counts of the things that were compared."""

    packs: int
    samples: int
    images: int
    videos: int
    tools: int
    systems: int

    def __str__(self) -> str:
        counts = [f"{n} {name}" for name, n in self._asdict().items() if n]
        return ", ".join(counts)


def pack(root: Path, source: Any, model: dict[str, Any], seq_length: int) -> Path:
    """Packs in its layout."""
    return pack_by_command(root, source, model, layout="loongforge", seq_length=seq_length)


def batches(packed: Path, encoder: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and batch of each pack, as its loader is opened."""
    from loongforge.data.multimodal.base.task_encoder import print_error_handler

    return batches_by_key(packed, encoder, print_error_handler)


def compare(packed: Path, encoder: Any, model: dict[str, Any], *, newline: bool) -> Compared:
    """Compare every pack, sample by sample, with what we make of it. `newline`: its template writes
    one after the last answer, and trains those after all answers."""
    packs = {raw.key: raw for raw in PackedFolder(packed)}
    ours = build_sample_encoder(model_options(**model))
    (end,), (line,) = (encoder.tokenizer.tokenize(text) for text in ("<|im_end|>", "\n"))
    counts = dict.fromkeys(Compared._fields, 0)
    for key, batch in batches(packed, encoder):
        pack, bounds = packs.pop(key), batch["cu_lengths"][0].tolist()
        samples = restore_pack(pack.record, key).sub_samples
        images = pictures(batch["image_grid_thw"], batch["imgs"])
        clips = pictures(batch["video_grid_thw"], batch["pixel_values_videos"])
        for sample, (first, after) in zip(samples, pairwise(bounds), strict=True):
            assert isinstance(sample, SourceSample)
            files = [pack.media[name] for name in sample.media]
            num_images = len(sample.images)
            one = ours.encode(sample, files[:num_images], files[num_images:])
            tokens = torch.tensor([*one.tokens, *[line] * newline])
            labels = torch.tensor([*one.labels, *[IGNORE_INDEX] * newline])
            if newline:
                labels[1:][(labels[:-1] == end) & (tokens[1:] == line)] = line
            assert tokens.tolist() == batch["tokens"][0, first:after].tolist(), sample
            assert labels.tolist() == batch["labels"][0, first:after].tolist(), sample
            compare_images(files, one, images)
            assert [next(clips)[0] for _ in sample.videos] == one.video_grid_thw.tolist()
            counts["tools"] += bool(sample.tools)
            counts["systems"] += sample.system is not None
            counts["images"] += num_images
            counts["videos"] += len(sample.videos)
        assert batch["tokens"].shape == (1, bounds[-1])
        assert not [*images, *clips]
        counts["packs"] += 1
        counts["samples"] += len(samples)
    return Compared(**counts)


def compare_images(
    files: list[bytes], ours: EncodedSample, theirs: Iterator[tuple[Any, ...]]
) -> None:
    """Patches of a sample's images are equal; it does not turn images upright by their EXIF."""
    found = pictures(torch.from_numpy(ours.image_grid_thw), torch.from_numpy(ours.pixel_values))
    for data, (grid, values) in zip(files, found, strict=False):
        its_grid, its_values = next(theirs)
        if not is_turned(Image.open(io.BytesIO(data))):
            assert its_grid == grid
            torch.testing.assert_close(its_values, values, rtol=0, atol=1e-6)
        assert sorted(its_grid) == sorted(grid)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole processor of Qwen2-VL, with the demo's limits."""
    folder = tmp_path_factory.mktemp("checkpoint")
    own, videos = builtin_processor(**MODEL), Qwen2VLVideoProcessor()
    parts = (own.image_processor, own.tokenizer, videos)
    Qwen2VLProcessor(*parts, chat_template=own.chat_template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo's samples in its layout, by task; those of `make demo` where it was run."""
    root, data = tmp_path_factory.mktemp("demo"), REPOSITORY / "demo_output/data"
    if not data.is_dir():
        data = root / "data"
        generate_demo_dataset(data, num_samples=120, progress=False)
    packed = {}
    for task, forms in SOURCES.items():
        source = [{"format": form, "path": str(data / at), "task": task} for form, at in forms]
        packed[task] = pack(root / task, source, dict(MODEL), SEQ_LENGTH)
    return packed


@pytest.mark.parametrize(
    ("task", "template"),
    [
        ("captioning", None),
        ("vqa", "qwen2-vl"),
        ("vqa", "qwen2.5-vl-hf"),
        ("bmr", "qwen2-vl"),
        ("bmr", "qwen2.5-vl-hf"),
    ],
)
def test_every_demo_pack_is_what_it_makes_of_it(
    task: str, template: str | None, demo: dict[str, Path], checkpoint: Path, say: Say
) -> None:
    limits = {"min_pixels": model_options().min_pixels, **MODEL}
    encoder = loongforge.task_encoder(checkpoint, template, SEQ_LENGTH, **limits)
    newline = template is not None and template.endswith("-hf")
    # Captions' images are resized by the checkpoint's processor alone, on transformers' default
    # backend; others before that, by Pillow.
    model = {**MODEL, "resize": "torch" if task == "captioning" else "pil"}
    compared = compare(demo[task], encoder, model, newline=newline)
    assert compared.samples > 30
    say(f"{task}, template {template}: {compared} read, tokens and labels equal")


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole processor of Qwen3-VL, on a small vocabulary."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    save_with_template(tiny_tokenizer(QWEN3_TEXT_TOKENS), QWEN3_VL_TEMPLATE, folder)
    half = [0.5] * 3
    images = Qwen2VLImageProcessorPil(patch_size=16, image_mean=half, image_std=half, **PIXELS)
    parts = (images, AutoTokenizer.from_pretrained(folder), Qwen3VLVideoProcessor())
    Qwen3VLProcessor(*parts, chat_template=QWEN3_VL_TEMPLATE).save_pretrained(folder)
    return folder


def test_tools_and_system_messages_survive(qwen3_vl: Path, tmp_path: Path, say: Say) -> None:
    source = {"format": "jsonl", "path": str(tool_dialogues(tmp_path / "source")), "task": "bmr"}
    model = {"family": "qwen3_vl", "processor": str(qwen3_vl), **PIXELS}
    packed = pack(tmp_path, source, model, 1024)
    encoder = loongforge.task_encoder(qwen3_vl, "qwen3-vl-hf", 1024, **PIXELS)
    compared = compare(packed, encoder, model, newline=True)
    assert (compared.samples, compared.tools, compared.systems) == (14, 3, 4)
    say(f"Qwen3-VL, template qwen3-vl-hf: {compared} read, tokens and labels equal")


def test_packs_leave_room_for_images_that_it_resizes_twice(
    qwen3_vl: Path, tmp_path: Path, say: Say
) -> None:
    """Images of Qwen3-VL: to multiples of 28, and of 32. It drops packs that become too long."""
    rng = np.random.default_rng(0)
    for i, (width, height) in enumerate(rng.integers(40, 200, (60, 2)).tolist()):
        write_json(tmp_path / f"source/{i}.json", {"question": "What?", "answer": "A blot."})
        (tmp_path / f"source/{i}.jpg").write_bytes(image_bytes(width, height))
    source = {"format": "pairs", "path": str(tmp_path / "source"), "task": "vqa"}
    model = {"family": "qwen3_vl", "processor": str(qwen3_vl), **PIXELS}
    packed = pack(tmp_path, source, model, 512)
    encoder = loongforge.task_encoder(qwen3_vl, "qwen3-vl-hf", 512, **PIXELS)
    lengths = [batch["cu_lengths"][0, -1].item() for _, batch in batches(packed, encoder)]
    measured = read_json(packed / "manifest.json")["counts"]["tokens"]
    assert max(lengths) <= 512
    assert sum(lengths) > measured + 60  # not only by their newlines
    say(
        f"Qwen3-VL: {len(lengths)} packs of images of any size, measured {measured} "
        f"tokens, are {sum(lengths)} there, at most {max(lengths)} of 512 in one"
    )


def test_videos(checkpoint: Path, tmp_path: Path, say: Say) -> None:
    """Beside images and text, in packs of their own."""
    source, lines = tmp_path / "source", []
    source.mkdir()
    for i in range(12):
        kind = ("image", "video", "text")[i % 3]
        container = ("mp4", "matroska")[i // 3 % 2]
        name = f"{i}.{'webp' if kind == 'image' else container.replace('matroska', 'mkv')}"
        if kind == "image":
            (source / name).write_bytes(image_bytes(60 + i, 90, "WEBP"))
        elif kind == "video":
            (source / name).write_bytes(make_video(10 + 3 * i, container=container))
        placeholder = "" if kind == "text" else f"<{kind}>"
        messages = dialogue(f"{placeholder}What is {i}?", "A bar.", "Sure?", "Yes. " * (i + 1))
        media = {} if kind == "text" else {f"{kind}s": [name]}
        lines.append(json.dumps({"id": str(i), "messages": messages, **media}))
    (source / "data.jsonl").write_text("\n".join(lines))
    jsonl = {"format": "jsonl", "path": str(source / "data.jsonl"), "task": "bmr"}
    packed = pack(tmp_path, jsonl, dict(MODEL), SEQ_LENGTH)
    limits = {"min_pixels": model_options().min_pixels, **MODEL}
    encoder = loongforge.task_encoder(checkpoint, "qwen2-vl", SEQ_LENGTH, **limits)
    compared = compare(packed, encoder, dict(MODEL), newline=False)
    assert (compared.packs, compared.samples, compared.videos) == (3, 12, 4)
    say(f"videos, template qwen2-vl: {compared} read, tokens and labels equal")
