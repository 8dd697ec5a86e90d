"""Packs in the hands of others: Energon's commands, the plain webdataset library, the demo's
training; and records with videos or tools, from a source to the rows that a trainer reads."""

import io
import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import webdataset
from click.testing import CliRunner
from megatron.energon import get_loader
from megatron.energon.cli.main import main as energon
from PIL import Image

from offline_packing.demo import training
from offline_packing.report.pages import render_packs
from offline_packing.report.preview import preview
from offline_packing.report.preview_text import render_pack
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.model_inputs import normalise_pixels
from task_encoders.samples import IGNORE_INDEX
from tests.helpers.datasets import PAIRS, image_bytes, make_run, outcomes, packed_run, write_json
from tests.helpers.energon_batches import batches_of
from tests.helpers.formats import lines, write_file
from tests.helpers.outputs import members_of
from tests.helpers.pages import Elements
from tests.helpers.videos import make_video
from tests.world import Source, World, task_encoder

LIMITS = {"max_pixels": 28 * 28 * 16, "video_min_pixels": 784, "video_max_pixels": 784 * 9}


@pytest.mark.parametrize("task", PAIRS)
def test_others_accept_the_folder(task: str, world: World) -> None:
    root = world.packed(task)
    for command in (["info"], ["lint"], ["preview", "--split-parts", "train"]):
        done = CliRunner().invoke(energon, [*command, str(root)], input="n\n")
        assert done.exit_code == 0, (done.output, done.exception)
    shards = sorted(map(str, root.glob("*.tar")))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False).decode())
    packed = require_manifest(root).counts.packed
    assert sum(len(sample["json"]["captions"]) for sample in samples) == packed
    for sample in samples:
        nested = [name if isinstance(name, list) else [name] for name in sample["json"]["images"]]
        assert all(name in sample for names in nested for name in names)


@pytest.fixture
def videos(world: World) -> Run:
    return world.run("videos", model=LIMITS, pack={"seq_length": 1024})


def test_the_index_counts_images_and_videos(videos: Run) -> None:
    rows = open_index(videos).table().to_pylist()
    assert sorted((r["num_images"], r["num_videos"]) for r in rows) == sorted(
        [(0, 1)] * 3 + [(1, 2)] * 3 + [(1, 0)] * 3 + [(0, 0)] * 3
    )
    for row in rows:
        extensions = [medium["extension"] for medium in row["media"]]
        assert len(extensions) == row["num_images"] + row["num_videos"]
        assert extensions == sorted(extensions, key=lambda name: name != "jpg")
        assert len(row["grid_thw"]) == 3 * len(extensions)
    names = [name.partition(".")[2] for name in members_of(videos.workspace.root)]
    suffixes = {name.rpartition(".")[2] for name in names if name.startswith("vid")}
    assert suffixes == {"mp4", "webm", "avi", "mov"}


def test_the_demo_proves_a_batch_of_images_and_videos(videos: Run) -> None:
    encoder = task_encoder(videos)
    batches = batches_of(videos.workspace.root, encoder, micro_batch_size=2)
    difference = training.compare_packed_with_unpacked(
        training.tiny_qwen2_vl(weight_std=0.08), batches
    )
    assert difference.num_tokens > 100
    assert difference.packed <= 1e-4
    assert difference.without_boundaries >= 1e-1


def test_pixels_of_videos_may_travel_as_bytes(videos: Run) -> None:
    encoders = task_encoder(videos), task_encoder(videos, pixel_transport="uint8")
    both = (batches_of(videos.workspace.root, encoder) for encoder in encoders)
    for values, as_bytes in zip(*both, strict=True):
        assert as_bytes.pixel_values_videos.dtype == torch.uint8
        same = normalise_pixels(as_bytes)
        assert torch.equal(same.pixel_values_videos, values.pixel_values_videos)
        assert torch.equal(same.imgs, values.imgs)
        assert values.video_grid_thw.dtype == torch.int32
        assert values.num_tiles.shape == (len(values.image_grid_thw),)


def test_preview_shows_grids_and_first_frames(videos: Run) -> None:
    packs = list(preview(videos, num_packs=100))
    shown = [video for pack in packs for sub in pack.sub_samples for video in sub.videos]
    assert len(shown) == 9
    page = Elements(render_packs(packs, "bmr").decode())
    assert page.names["img"] == 9 + 6
    text = "".join(click.unstyle(render_pack(pack, full=True)) for pack in packs)
    for video in shown:
        t, rows, columns = video.grid
        size, num_tokens = f"{rows}x{columns}", t * rows * columns // 4
        assert video.num_frames == 2 * t
        assert f"[video {video.num_frames} frames {size}: {num_tokens:,} tokens]" in text
        assert f"{video.num_frames} frames {video.width}x{video.height} -> {size}" in text
        assert f"{video.name}: {video.num_frames} frames of" in page.text
        frame = np.asarray(Image.open(io.BytesIO(video.picture)))
        assert frame.shape == (video.height, video.width, 3)
        # The first frame has its bar at the left; turned upright by 90 degrees, at the top.
        bar = frame[:6, :, :2] if video.height > video.width else frame[:, :6, :2]
        assert bar.mean() > 180


def test_budgets_and_groups_count_videos(world: World) -> None:
    pack = {"budgets": {"videos": 2}, "homogeneous": True, "order": {"num_ranks": 2}}
    run = world.run("videos", model=LIMITS, pack={"seq_length": 1024, **pack})
    for name, data in members_of(run.workspace.root).items():
        if name.endswith(".json"):
            record = orjson.loads(data)
            videos = record.get("videos", [[]] * len(record["images"]))
            assert sum(map(len, videos)) <= 2
            with_media = {bool(i or v) for i, v in zip(record["images"], videos, strict=True)}
            assert len(with_media) == 1


@pytest.mark.parametrize("task", ["captioning", "vqa"])
def test_captions_and_questions_may_have_videos(tmp_path: Path, task: str) -> None:
    record = {"question": "What?", "answer": "A bar."} if task == "vqa" else {"caption": "A bar"}
    for i in range(3):
        write_json(tmp_path / f"data/{i}.json", record)
        write_file(tmp_path / f"data/{i}.mp4", make_video(4 + i))
    source = {"format": "pairs", "path": str(tmp_path / "data"), "task": task}
    run = packed_run(source, tmp_path / "out", model=LIMITS)
    assert verify(run, deep=True).problems == []
    batches = batches_of(tmp_path / "out", task_encoder(run))
    assert sum(len(batch.video_grid_thw) for batch in batches) == 3
    assert all(batch.imgs.tolist() == [[0.0]] for batch in batches)


BAD_FILES = {
    "empty": (b"", "bad_video"),
    "text": (b"no video at all", "bad_video"),
    "cut": (make_video(20)[:2000], "truncated_video"),
    "good": (make_video(5), "ok"),
}


def test_bad_videos_are_set_aside(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name, (content, _) in BAD_FILES.items():
        write_json(data / f"{name}.json", {"caption": "A bar"})
        write_file(data / f"{name}.mp4", content)
    write_json(data / "both.json", {"caption": "A bar"})
    write_file(data / "both.mp4", make_video(5))
    write_file(data / "both.jpg", image_bytes())
    write_json(data / "missing.json", {"caption": "x", "video": "nowhere.mp4"})
    write_json(data / "outside.json", {"caption": "x", "video": "../a.mp4"})
    expected = {name: reason for name, (_, reason) in BAD_FILES.items()}
    expected |= {"both": "ambiguous_image", "missing": "missing_image"}
    expected |= {"outside": "path_outside_root"}
    assert outcomes(make_run(data, tmp_path / "out", model=LIMITS)) == expected


def test_a_damaged_video_is_dropped_from_its_pack(tmp_path: Path) -> None:
    """Its frames are zeros: the header is whole, and only decoding finds it."""
    good, bad = make_video(6), make_video(6, codec_options={"bf": "0"})
    begin, end = bad.index(b"mdat") + 4, bad.index(b"moov") - 4
    bad = bad[:begin] + bytes(end - begin) + bad[end:]
    for name, data in (("good", good), ("bad", bad)):
        write_json(tmp_path / f"data/{name}.json", {"caption": "A bar"})
        write_file(tmp_path / f"data/{name}.mp4", data)
    run = packed_run(tmp_path / "data", tmp_path / "out", model=LIMITS)
    result = verify(run, deep=True)
    assert result.num_problems == 1
    assert "truncated_video" in result.problems[0]
    (batch,) = batches_of(tmp_path / "out", task_encoder(run))
    assert batch.sub_sample_keys == ["good"]
    assert "bad: truncated_video" in batch.dropped[0]


QWEN3: dict[str, Any] = {"family": "qwen3_vl", "min_pixels": 1024, "max_pixels": 65536}
TOOLS = [{"type": "function", "function": {"name": "zoom", "description": "Shows <|im_end|>."}}]


def with_tools(folder: Path) -> Source:
    """Write records with calls, results, and answers without loss; tools and calls are JSON, as
    tables keep them."""
    records = []
    for i in range(12):
        call = {"name": "zoom", "arguments": {"at": [i, 2]}}
        messages = [
            {"from": "human", "value": f"<image>What is number {i}?"},
            {"from": "function_call", "value": json.dumps(call), "loss_weight": i % 2},
            {"from": "observation", "value": f"<image>{i} of 12"},
            {"from": "gpt", "value": f"<think>\nHm.\n</think>\n\nIt is {i}."},
        ]
        own = {"messages": messages, "images": ["a.jpg", "b.jpg"], "tools": json.dumps(TOOLS)}
        records.append(own)
    for name in ("a.jpg", "b.jpg"):
        write_file(folder / name, image_bytes(64, 96))
    write_file(folder / "chat.jsonl", lines(records))
    pq.write_table(pa.Table.from_pylist(records), folder / "chat.parquet")
    return {"format": "jsonl", "path": str(folder / "chat.jsonl"), "task": "bmr"}


def test_tools_from_records_to_rows(world: World, tmp_path: Path) -> None:
    """As JSON lines, as a table, and repacked."""
    sections = {"model": QWEN3, "pack": {"seq_length": 1024}}
    source, run = world.source(with_tools), world.run(with_tools, **sections)
    root, counts = run.workspace.root, require_manifest(run.workspace.root).counts
    assert (counts.packed, counts.set_aside) == (12, {})
    path = source["path"].replace(".jsonl", ".parquet")  # type: ignore[call-overload]
    for name, form, given in (("a", "parquet", path), ("b", "packs", str(root))):
        other = {"format": form, "path": given, "task": "bmr"}
        packed_run(other, tmp_path / name, **sections)
        assert require_manifest(tmp_path / name).counts.tokens == counts.tokens
    tokenizer = task_encoder(run).encoder.tokenizer
    dataset = training.packed_train_dataset(root, "bmr", 1024, repeat=False, **QWEN3)
    spelled = trained = ""
    for batch in get_loader(dataset):
        kept = batch.labels[batch.labels != IGNORE_INDEX].tolist()
        spelled += "".join(text for text, _ in tokenizer.spell(batch.tokens[0].tolist()))
        trained += "".join(text for text, _ in tokenizer.spell(kept))
    called = '<tool_call>\n{"name": "zoom", "arguments": {"at": ['
    assert spelled.count(called) == 12
    assert spelled.count('"description": "Shows <|im_end|>."') == 12
    assert spelled.count("<tool_response>\n<|vision_start|>") == 12
    assert trained.count(called) == 6
    assert trained.count("<think>\nHm.\n</think>\n\nIt is ") == 12
    assert "tool_response" not in trained
