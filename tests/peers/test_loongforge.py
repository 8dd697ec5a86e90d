"""LoongForge on packs of its layout: its loader, cookers and task encoder, up to the batch.

It is not a package: LOONGFORGE names a checkout of github.com/baidu-baige/LoongForge.
"""

import json
import os
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from offline_packing.demo.generate import generate_demo_dataset
from offline_packing.demo.run import MODEL, SEQ_LENGTH, SOURCES
from offline_packing.storage.files import read_json
from task_encoders.families import model_options
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.text.qwen_templates import QWEN3_VL_TEMPLATE
from task_encoders.text.qwen_vocabulary import QWEN3_TEXT_TOKENS
from tests.helpers.datasets import dialogue, image_bytes, write_json
from tests.helpers.layout_readers import REPOSITORY, OwnCode, pack_by_command, said_of
from tests.helpers.loongforge import tool_dialogues
from tests.helpers.tiny_tokenizers import save_processor, save_with_template, tiny_tokenizer
from tests.helpers.videos import make_video
from tests.peers import Say

if not os.environ.get("LOONGFORGE"):
    pytest.skip("LOONGFORGE=DIR names no checkout of LoongForge", allow_module_level=True)
VERSION = f"LoongForge on energon {version('megatron-energon')}"
PIXELS = {"min_pixels": 4096, "max_pixels": 32_768}


OWN = OwnCode(
    "loongforge",
    "chat_template",
    ("multimodal.vlm_task_encoder", "VLMTaskEncoder"),
    "multimodal.base.task_encoder",
)
OWN.install(Path(os.environ["LOONGFORGE"]).resolve())


def task_encoder(checkpoint: Path, template: str | None, seq_length: int, **limits: int) -> Any:
    """Its own for a checkpoint. `limits`: min_pixels and max_pixels."""
    return OWN.task_encoder(
        checkpoint,
        template,
        seq_length=seq_length,
        image_resolution=1 << 20,  # larger images would be made smaller first
        # As Qwen2-VL's video processor: it takes 1.05 times the least, and frames share the last.
        frame_min_pixels=95_574,
        frame_max_pixels=602_112,
        video_max_pixels=602_112 * 768 // 2,
        fps=2.0,
        fps_min_frames=4,
        fps_max_frames=768,
        max_packed_tokens=seq_length,
        num_images_expected=1 << 20,
        max_buffer_size=1,
        sft_dataset=None,
        sft_dataset_config=None,
        **limits,
    )


def pack(root: Path, source: Any, model: dict[str, Any], seq_length: int) -> Path:
    """Packs in its layout."""
    return pack_by_command(root, source, model, layout="loongforge", seq_length=seq_length)


def compare(packed: Path, encoder: Any, model: dict[str, Any], **options: Any) -> Counter[str]:
    return OWN.compare(packed, encoder, model, tolerance=1e-6, **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole processor of Qwen2-VL, with the demo's limits."""
    folder, own = tmp_path_factory.mktemp("checkpoint"), builtin_processor()
    save_processor(folder, own.tokenizer, own.chat_template, **MODEL)
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
    encoder = task_encoder(checkpoint, template, SEQ_LENGTH, **limits)
    newline = template is not None and template.endswith("-hf")
    # Captions' images are resized by the checkpoint's processor alone, on transformers' default
    # backend; others before that, by Pillow.
    model = {**MODEL, "resize": "torch" if task == "captioning" else "pil"}
    compared = compare(demo[task], encoder, model, newline=newline)
    assert compared["samples"] > 30
    say(f"{task}, template {template}: {said_of(compared)}: tokens and labels equal")


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole processor of Qwen3-VL, on a small vocabulary."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    save_with_template(tiny_tokenizer(QWEN3_TEXT_TOKENS), QWEN3_VL_TEMPLATE, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    save_processor(folder, tokenizer, QWEN3_VL_TEMPLATE, "qwen3_vl", **PIXELS)
    return folder


def test_tools_and_system_messages_survive(qwen3_vl: Path, tmp_path: Path, say: Say) -> None:
    source = {"format": "jsonl", "path": str(tool_dialogues(tmp_path / "source")), "task": "bmr"}
    model = {"family": "qwen3_vl", "processor": str(qwen3_vl), **PIXELS}
    packed = pack(tmp_path, source, model, 1024)
    encoder = task_encoder(qwen3_vl, "qwen3-vl-hf", 1024, **PIXELS)
    compared = compare(packed, encoder, model, newline=True)
    assert [compared[name] for name in ("samples", "tools", "systems")] == [14, 3, 4]
    say(f"Qwen3-VL, template qwen3-vl-hf: {said_of(compared)}: tokens and labels equal")


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
    encoder = task_encoder(qwen3_vl, "qwen3-vl-hf", 512, **PIXELS)
    lengths = [batch["cu_lengths"][0, -1].item() for _, batch in OWN.batches(packed, encoder)]
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
    encoder = task_encoder(checkpoint, "qwen2-vl", SEQ_LENGTH, **limits)
    compared = compare(packed, encoder, dict(MODEL), newline=False)
    assert [compared[name] for name in ("packs", "samples", "videos")] == [3, 12, 4]
    say(f"videos, template qwen2-vl: {said_of(compared)}: tokens and labels equal")
