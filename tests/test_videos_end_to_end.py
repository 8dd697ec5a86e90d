"""Images, videos and text from files to packs, through Energon's loader, into both models."""

import io
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson
import pytest
import torch
from PIL import Image

from offline_packing.demo import training
from offline_packing.index.table import Index
from offline_packing.report.pages import render_packs
from offline_packing.report.preview import preview
from offline_packing.report.preview_text import render_pack
from offline_packing.runs.artifacts import open_index
from offline_packing.storage.tars import scan_tar
from offline_packing.verify.verify import verify
from task_encoders.model_inputs import normalise_pixels
from tests.helpers.datasets import (
    image_bytes,
    make_run,
    outcomes,
    pack_all,
    packed_run,
    write_json,
)
from tests.helpers.elements import Elements
from tests.helpers.energon_batches import batches_of, encoder_of
from tests.helpers.videos import make_video, video_pairs

SEQ_LENGTH = 1024
MODEL = {"max_pixels": 28 * 28 * 16, "video_min_pixels": 784, "video_max_pixels": 784 * 9}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("videos")
    source = {"format": "pairs", "path": str(video_pairs(root / "data")), "task": "bmr"}
    return packed_run(source, root / "out", model=MODEL, pack={"seq_length": SEQ_LENGTH})


def test_every_sample_is_packed_and_verified(run: Any) -> None:
    result = verify(run, deep=True)
    assert result.ok, result.problems
    assert (result.num_samples, result.num_images, result.num_videos) == (12, 6, 9)


def test_the_index_counts_images_and_videos(run: Any) -> None:
    samples: Index = open_index(run)
    rows = samples.table().to_pylist()
    assert sorted((r["num_images"], r["num_videos"]) for r in rows) == sorted(
        [(0, 1)] * 3 + [(1, 2)] * 3 + [(1, 0)] * 3 + [(0, 0)] * 3
    )
    for row in rows:
        extensions = [medium["extension"] for medium in row["media"]]
        assert len(extensions) == row["num_images"] + row["num_videos"]
        assert extensions == sorted(extensions, key=lambda name: name != "jpg")
        assert len(row["grid_thw"]) == 3 * len(extensions)


def test_members_of_a_pack(run: Any) -> None:
    path = Path(run.config.output.path)
    names: list[str] = []
    for tar in sorted(path.glob("*.tar")):
        data = tar.read_bytes()
        for entry in scan_tar(tar):
            parts = {part.name: data[part.offset : part.offset + part.size] for part in entry.parts}
            record = orjson.loads(parts["json"])
            videos = [name for own in record["videos"] for name in own]
            images = [name for own in record["images"] for name in own]
            assert {*videos, *images, "json"} == set(parts)
            assert [name[:6] for name in videos] == [f"vid{i:03d}" for i in range(len(videos))]
            names += videos
    assert {name.rpartition(".")[2] for name in names} == {"mp4", "webm", "avi", "mov"}


def test_a_batch_holds_images_and_videos(run: Any) -> None:
    batches = batches_of(run.workspace.root, encoder_of(run), micro_batch_size=2)
    assert sum(len(batch.image_grid_thw) for batch in batches) == 6
    assert sum(len(batch.video_grid_thw) for batch in batches) == 9
    for batch in batches:
        assert batch.video_grid_thw.dtype == torch.int32
        assert batch.pixel_values_videos.shape == (int(batch.video_grid_thw.prod(1).sum()), 1176)
        assert int((batch.tokens == 151_656).sum()) == len(batch.pixel_values_videos) // 4
        assert batch.num_tiles.shape == (len(batch.image_grid_thw),)


def test_pixels_of_videos_may_travel_as_bytes(run: Any) -> None:
    path = Path(run.config.output.path)
    for values, as_bytes in zip(
        batches_of(path, encoder_of(run)),
        batches_of(path, encoder_of(run, pixel_transport="uint8")),
        strict=True,
    ):
        assert as_bytes.pixel_values_videos.dtype == torch.uint8
        same = normalise_pixels(as_bytes)
        assert torch.equal(same.pixel_values_videos, values.pixel_values_videos)
        assert torch.equal(same.imgs, values.imgs)


def test_packed_equals_unpacked(run: Any) -> None:
    batches = batches_of(run.workspace.root, encoder_of(run), micro_batch_size=2)
    model = training.tiny_qwen2_vl(weight_std=0.08)
    difference = training.compare_packed_with_unpacked(model, batches)
    assert difference.num_tokens > 100
    assert difference.packed <= 1e-4
    assert difference.without_boundaries >= 1e-1


def test_preview_shows_grids_and_first_frames(run: Any) -> None:
    packs = list(preview(run, num_packs=100))
    videos = [video for pack in packs for sub in pack.sub_samples for video in sub.videos]
    assert len(videos) == 9
    page = Elements(render_packs(packs, "bmr").decode())
    assert page.names["img"] == 9 + 6
    text = "".join(click.unstyle(render_pack(pack, full=True)) for pack in packs)
    for video in videos:
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


@pytest.mark.parametrize("task", ["captioning", "vqa"])
def test_captions_and_questions_may_have_videos(tmp_path: Path, task: str) -> None:
    for i in range(6):
        record = (
            {"question": "What?", "answer": "A bar."} if task == "vqa" else {"caption": "A bar"}
        )
        write_json(tmp_path / "data" / f"{i}.json", record)
        (tmp_path / "data" / f"{i}.mp4").write_bytes(make_video(4 + i))
    source = {"format": "pairs", "path": str(tmp_path / "data"), "task": task}
    run = packed_run(source, tmp_path / "out", model=MODEL)
    result = verify(run, deep=True)
    assert result.ok, result.problems
    assert (result.num_samples, result.num_videos) == (6, 6)
    batches = batches_of(tmp_path / "out", encoder_of(run))
    assert sum(len(batch.video_grid_thw) for batch in batches) == 6
    assert all(batch.imgs.tolist() == [[0.0]] for batch in batches)


def test_budgets_groups_and_cost_count_videos(run: Any, tmp_path: Path) -> None:
    source = run.config.source[0].model_dump()
    packed_run(
        source,
        tmp_path / "out",
        model=MODEL,
        pack={
            "seq_length": SEQ_LENGTH,
            "budgets": {"videos": 2},
            "homogeneous": True,
            "order": {"num_ranks": 2},
        },
    )
    for tar in sorted((tmp_path / "out").glob("*.tar")):
        data = tar.read_bytes()
        for entry in scan_tar(tar):
            part = next(part for part in entry.parts if part.name == "json")
            record = orjson.loads(data[part.offset : part.offset + part.size])
            videos = record.get("videos", [[]] * len(record["images"]))
            assert sum(map(len, videos)) <= 2
            with_media = {bool(i or v) for i, v in zip(record["images"], videos, strict=True)}
            assert len(with_media) == 1


def test_the_llava_onevision_layout_holds_no_videos(run: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "data" / "a.json", {"caption": "A bar"})
    (tmp_path / "data" / "a.mp4").write_bytes(make_video(4))
    write_json(
        tmp_path / "data" / "both.json",
        {"caption": "A bar", "images": ["b.jpg"], "videos": ["a.mp4"]},
    )
    (tmp_path / "data" / "b.jpg").write_bytes(image_bytes())
    write_json(tmp_path / "data" / "b.json", {"caption": "A picture"})
    source = {"format": "pairs", "path": str(tmp_path / "data"), "task": "captioning"}
    output = {"layout": "llava_onevision"}
    manifest = pack_all(make_run(source, tmp_path / "out", model=MODEL, output=output))
    assert manifest.counts.set_aside == {"not_in_layout": 2}
    assert manifest.counts.packed == 1


BAD_FILES = {
    "empty": (b"", "bad_video"),
    "text": (b"no video at all", "bad_video"),
    "cut": (make_video(20)[:2000], "truncated_video"),
    "good": (make_video(5), "ok"),
}


def test_bad_videos_are_set_aside(tmp_path: Path) -> None:
    for name, (data, _) in BAD_FILES.items():
        write_json(tmp_path / "data" / f"{name}.json", {"caption": "A bar"})
        (tmp_path / "data" / f"{name}.mp4").write_bytes(data)
    write_json(tmp_path / "data" / "both.json", {"caption": "A bar"})
    (tmp_path / "data" / "both.mp4").write_bytes(make_video(5))
    (tmp_path / "data" / "both.jpg").write_bytes(image_bytes())
    write_json(tmp_path / "data" / "missing.json", {"caption": "x", "video": "nowhere.mp4"})
    write_json(tmp_path / "data" / "outside.json", {"caption": "x", "video": "../a.mp4"})
    source = {"format": "pairs", "path": str(tmp_path / "data"), "task": "captioning"}
    expected = {name: reason for name, (_, reason) in BAD_FILES.items()}
    expected |= {"both": "ambiguous_image", "missing": "missing_image"}
    expected |= {"outside": "path_outside_root"}
    assert outcomes(make_run(source, tmp_path / "out", model=MODEL)) == expected


def test_a_damaged_video_is_dropped_from_its_pack(tmp_path: Path) -> None:
    """Its frames are zeros: the header is whole, and only decoding finds it."""
    good, bad = make_video(6), make_video(6, codec_options={"bf": "0"})
    begin, end = bad.index(b"mdat") + 4, bad.index(b"moov") - 4
    bad = bad[:begin] + bytes(end - begin) + bad[end:]
    for name, data in (("good", good), ("bad", bad)):
        write_json(tmp_path / "data" / f"{name}.json", {"caption": "A bar"})
        (tmp_path / "data" / f"{name}.mp4").write_bytes(data)
    source = {"format": "pairs", "path": str(tmp_path / "data"), "task": "captioning"}
    run = packed_run(source, tmp_path / "out", model=MODEL)
    result = verify(run, deep=True)
    assert result.num_problems == 1
    assert "truncated_video" in result.problems[0]
    (batch,) = batches_of(tmp_path / "out", encoder_of(run))
    assert batch.sub_sample_keys == ["good"]
    assert "bad: truncated_video" in batch.dropped[0]
