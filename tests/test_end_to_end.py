"""Packs in the hands of others: Energon's commands, the plain webdataset library, the demo's
proof and the previews on images and videos."""

import io
from pathlib import Path

import click
import numpy as np
import pytest
import webdataset
from click.testing import CliRunner
from megatron.energon.cli.main import main as energon
from PIL import Image

from offline_packing.demo import training
from offline_packing.report.pages import render_packs
from offline_packing.report.preview import preview
from offline_packing.report.preview_text import render_pack
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.datasets import PAIRS, make_run, pack_all, write_json
from tests.helpers.energon_batches import batches_of
from tests.helpers.formats import write_file
from tests.helpers.pages import Elements
from tests.helpers.videos import make_video
from tests.world import World, task_encoder

LIMITS = {"max_pixels": 28 * 28 * 16, "video_min_pixels": 784, "video_max_pixels": 784 * 9}


@pytest.mark.parametrize(("task", "media"), [*((task, "copy") for task in PAIRS), ("bmr", "refer")])
def test_others_accept_the_folder(task: str, media: str, world: World) -> None:
    root = world.packed(task, output={"media": media})
    for command in (["info"], ["lint"], ["preview", "--split-parts", "train"]):
        done = CliRunner().invoke(energon, [*command, str(root)], input="n\n")
        assert done.exit_code == 0, (done.output, done.exception)
    shards = sorted(map(str, root.glob("*.tar")))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False).decode())
    packed = require_manifest(root).counts.packed
    assert sum(len(sample["json"]["captions"]) for sample in samples) == packed
    for sample in samples if media == "copy" else ():
        nested = [name if isinstance(name, list) else [name] for name in sample["json"]["images"]]
        assert all(name in sample for names in nested for name in names)


@pytest.fixture
def videos(world: World) -> Run:
    return world.run("videos", model=LIMITS, pack={"seq_length": 1024})


def test_the_demo_proves_packs_of_images_and_videos(videos: Run) -> None:
    packs = PackedFolder(videos.workspace.root, task_encoder(videos))
    difference = training.compare_packed_with_unpacked(
        training.tiny_qwen2_vl(weight_std=0.08), packs, len(packs)
    )
    assert difference.num_tokens > 100
    assert difference.packed <= 1e-4
    assert difference.without_boundaries >= 1e-1


def test_a_damaged_video_is_dropped_from_its_pack(tmp_path: Path) -> None:
    """Its frames are zeros: the header is whole, and only decoding finds it."""
    good, bad = make_video(6), make_video(6, codec_options={"bf": "0"})
    begin, end = bad.index(b"mdat") + 4, bad.index(b"moov") - 4
    bad = bad[:begin] + bytes(end - begin) + bad[end:]
    for name, data in (("good", good), ("bad", bad)):
        write_json(tmp_path / f"data/{name}.json", {"caption": "A bar"})
        write_file(tmp_path / f"data/{name}.mp4", data)
    run = make_run(tmp_path / "data", tmp_path / "out", model=LIMITS)
    pack_all(run)
    assert ["truncated_video" in line for line in verify(run, deep=True).problems] == [True]
    (batch,) = batches_of(tmp_path / "out", task_encoder(run))
    assert batch.sub_sample_keys == ["good"]
    assert "bad: truncated_video" in batch.dropped[0]


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
