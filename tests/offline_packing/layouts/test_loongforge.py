"""Packs with LoongForge's fields: they are ours as well, and nothing of a sample is lost."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from offline_packing.errors import ConfigError
from offline_packing.layouts.loongforge import _room_of_images
from offline_packing.verify.verify import verify
from task_encoders.media.image import VisionSettings, smart_resize
from tests.helpers.datasets import (
    captioning_pairs,
    dialogue,
    image_bytes,
    index_rows,
    make_run,
    pack_all,
)
from tests.helpers.energon_batches import batches_of, encoder_of
from tests.helpers.loongforge import CALL, SYSTEM, tool_dialogues
from tests.helpers.outputs import members_of
from tests.helpers.tiny_families import encoder_options, save_tokenizer
from tests.helpers.videos import make_video


def packed(root: Path, family: str = "qwen3_vl") -> Any:
    """A run over dialogues with tools, and its tokenizer's folder."""
    save_tokenizer(family, root / "tokenizer")
    source = {"format": "jsonl", "path": str(tool_dialogues(root / "source")), "task": "bmr"}
    model = {"family": family, "processor": str(root / "tokenizer")}
    model |= encoder_options(family)
    output, pack = {"layout": "loongforge"}, {"seq_length": 1024}
    return make_run(source, root / "packed", model=model, pack=pack, output=output)


def test_a_family_that_it_encodes_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'loongforge' holds no packs of qwen3_5: .* thought"):
        packed(tmp_path, "qwen3_5")


def test_packs_hold_its_fields_and_ours(tmp_path: Path) -> None:
    run = packed(tmp_path)
    counts = pack_all(run).counts
    aside = pq.read_table(run.workspace.plan / "set_aside.parquet").to_pylist()
    assert sorted(row["detail"].removeprefix("layout loongforge holds no ") for row in aside) == [
        "answer that begins with a line break",
        "answer untrained or cut, nor system or developer message further on",
        "empty system message",
        "image less than 28 pixels high or wide",
    ]
    assert counts.packed == 14
    assert verify(run, deep=True).ok
    found = records_of(run)
    conversations = [one for record in found for one in record["messages"]]
    assert sum("tools" in one for one in conversations) == 3
    assert sum(one["messages"][0] == SYSTEM for one in conversations) == 4
    assert (
        sum(
            message.get("tool_calls") == [CALL]
            for one in conversations
            for message in one["messages"]
        )
        == 3
    )


def records_of(run: Any) -> list[dict[str, Any]]:
    """The JSON of each pack."""
    members = members_of(run.workspace.root).items()
    return [json.loads(data) for name, data in members if name.endswith(".json")]


def mixed_media(root: Path, *, both: bool = False) -> Path:
    """Dialogues with images, with videos and with neither, twenty of each; `both`: one with two."""
    (root / "source").mkdir(parents=True)
    (root / "source/0.webp").write_bytes(image_bytes(84, 56, "WEBP"))
    (root / "source/0.mkv").write_bytes(make_video(8, container="matroska"))
    kinds: list[dict[str, Any]] = [{"images": ["0.webp"]}, {"videos": ["0.mkv"]}, {}]
    records = [{**kinds[i % 3], "id": f"sample{i}"} for i in range(60)]
    records += [{"images": ["0.webp"], "videos": ["0.mkv"], "id": "both"}] * both
    for i, record in enumerate(records):
        record["messages"] = dialogue(f"What is {i}?", "A blot.")
    (root / "source/data.jsonl").write_text("\n".join(map(json.dumps, records)))
    return root / "source/data.jsonl"


def test_each_conversation_is_its_samples_own_and_has_its_picture(tmp_path: Path) -> None:
    """Among neighbours of the same length in every respect."""
    pictures = [image_bytes(84, 56, "PNG", shade=i) for i in range(10)]
    dialogues = [dialogue(f"<image>What is {i}?", f"Blot {i}.") for i in range(10)]
    lines = []
    for i, (picture, messages) in enumerate(zip(pictures, dialogues, strict=True)):
        (tmp_path / f"{i}.png").write_bytes(picture)
        lines.append({"id": f"sample{i}", "images": [f"{i}.png"], "messages": messages})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = run_of(tmp_path / "data.jsonl", tmp_path / "out")
    pack_all(run)
    found: list[Any] = []
    files = members_of(run.workspace.root)
    for name in files:
        if name.endswith(".json"):
            record, key = json.loads(files[name]), name.removesuffix("json")
            assert len(record["messages"]) >= 3
            found += [
                (one["messages"], *(files[key + file] for file in own))
                for one, own in zip(record["messages"], record["media_files"], strict=True)
            ]
    assert sorted(found, key=str) == sorted(zip(dialogues, pictures, strict=True), key=str)


def run_of(source: Path, output: Path, **pack: Any) -> Any:
    named = {"format": "jsonl", "path": str(source), "task": "bmr"}
    return make_run(
        named, output, pack={"seq_length": 512, **pack}, output={"layout": "loongforge"}
    )


def test_a_pack_holds_media_of_one_type_in_all_its_samples(tmp_path: Path) -> None:
    run = run_of(mixed_media(tmp_path, both=True), tmp_path / "out")
    counts = pack_all(run).counts
    assert (counts.packed, counts.set_aside) == (60, {"not_in_layout": 1})
    names = {"image": r"img\d+.webp", "video": r"vid\d+.webm"}  # .mkv would stay undecoded
    seen = []
    for record in records_of(run):
        seen.append(record["media_type"])
        assert len(record["messages"]) == len(record["media_files"])
        for files in record["media_files"]:
            assert len(files) == (record["media_type"] in names)
            assert all(re.fullmatch(names[record["media_type"]], name) for name in files)
    assert set(seen) == {"image", "video", "text"}
    assert len(seen) < 30
    assert verify(run, deep=True).ok


def test_packs_leave_room_for_the_newline_behind_each_sample(tmp_path: Path) -> None:
    """Two samples that fill a pack would be too long there."""
    messages = dialogue("What?", "A blot.")
    lines = [json.dumps({"messages": messages, "id": f"sample{i}"}) for i in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    run = run_of(tmp_path / "data.jsonl", tmp_path / "measured")
    pack_all(run)
    (length,) = {row["num_tokens"] for row in index_rows(run)}
    for spare, samples in ((0, 1), (1, 1), (2, 2)):
        run = run_of(tmp_path / "data.jsonl", tmp_path / f"{spare}", seq_length=2 * length + spare)
        pack_all(run)
        assert {len(record["messages"]) for record in records_of(run)} == {samples}


def test_room_for_images_of_any_size() -> None:
    """Resizing twice stays within it; images are not only small or large, but thin as well."""
    rng = np.random.default_rng(0)
    mean = std = (0.5, 0.5, 0.5)
    for least, most in ((65_536, 16_777_216), (65_536, 1 << 20), (4096, 1 << 20)):
        first = VisionSettings(least, most, 200, patch_size=14, mean=mean, std=std)
        second = VisionSettings(least, most, 200, patch_size=16, mean=mean, std=std)
        grown = 0
        for _ in range(4000):
            size = np.exp(rng.uniform(np.log(20), np.log(3000), 2)).astype(int).tolist()
            height, width = smart_resize(*size, second)
            rows, columns = smart_resize(*smart_resize(*size, first), second)
            grid = np.array([[1, height // 16, width // 16]])
            more = (rows * columns - height * width) // 32**2
            assert more <= _room_of_images(grid, least / 32**2)[0], size
            grown += more > 0
        assert grown > 300


def test_captions_are_those_of_the_llava_onevision_layout(tmp_path: Path) -> None:
    """Packs that it reads as `packed_captioning`, with one image each."""
    source = captioning_pairs(tmp_path / "source", 12)
    (source / "part0/text.json").write_text(
        json.dumps({"caption": "Nothing to see.", "images": []})
    )
    named = {"format": "pairs", "path": str(source), "task": "captioning"}
    runs = {
        layout: make_run(named, tmp_path / layout, output={"layout": layout})
        for layout in ("loongforge", "llava_onevision")
    }
    for run in runs.values():
        assert pack_all(run).counts.packed == 12
    records, others = map(records_of, runs.values())
    assert records == others
    assert verify(runs["loongforge"], deep=True).ok
    meta = runs["loongforge"].workspace.root / ".nv-meta"
    dataset = yaml.safe_load((meta / "dataset.yaml").read_text())
    assert dataset["__class__"] == "CrudeWebdataset"
    assert dataset["subflavors"]["sample_type"] == "packed_captioning"


@pytest.mark.parametrize("task", ["captioning", "bmr"])
def test_our_task_encoder_reads_them(tmp_path: Path, task: str) -> None:
    if task == "bmr":
        run = packed(tmp_path)
    else:
        source = {"format": "pairs", "path": str(captioning_pairs(tmp_path / "source", 14))}
        run = make_run(source | {"task": task}, tmp_path / "out", output={"layout": "loongforge"})
    pack_all(run)
    batches = batches_of(run.workspace.root, encoder_of(run))
    keys = [key for batch in batches for key in batch.sub_sample_keys]
    assert len(set(keys)) == len(keys) == 14
