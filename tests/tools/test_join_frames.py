"""Lists of frames as videos: the frames that are decoded, the records, and what is refused."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from offline_packing.sources import open_source
from task_encoders.media.video_file import decode_frames, read_mp4_header, read_video_header
from task_encoders.records.record import to_sample
from task_encoders.samples import SampleError
from tests.helpers.datasets import dialogue, write_json
from tests.helpers.formats import lines, write_file
from tools.join_frames import main

KINDS: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG"},
    "jpg": {"format": "JPEG", "quality": 95, "subsampling": 0},
    "jpeg": {"format": "JPEG", "quality": 90, "subsampling": 2},
}
#: Most that a value of a decoded frame differs from the picture's, and the mean of all.
DIFFERENCES = {"png": (0, 0.0), "jpg": (3, 0.2), "jpeg": (255, 20.0)}


def picture(number: int, mode: str = "RGB", size: tuple[int, int] = (64, 48)) -> Image.Image:
    rows, columns = np.indices(size[::-1])
    colours = np.stack([columns * 4, rows * 5 + number * 20, rows * columns // 16], -1) % 256
    return Image.fromarray(colours.astype(np.uint8)).convert(mode)


def frames(folder: Path, kind: str, count: int = 5, mode: str = "RGB") -> list[str]:
    names = [f"{kind}{mode}{number}.{kind}" for number in range(count)]
    for number, name in enumerate(names):
        picture(number, mode).save(folder / name, **KINDS[kind])
    return names


@pytest.mark.parametrize(
    ("kind", "mode"), [("png", "P"), *((kind, mode) for kind in KINDS for mode in ("RGB", "L"))]
)
def test_joined_frames_are_the_pictures(kind: str, mode: str, tmp_path: Path) -> None:
    names = frames(tmp_path, kind, mode=mode)
    rows = [
        {"messages": said({"type": "video", "video": names, "sample_fps": 0.5, "fps": 1})},
        {"messages": dialogue("<video><video>?", "It."), "videos": [names[:2], names[2:]]},
        {"messages": dialogue("<video>?", "It."), "video": names, "sample_fps": 4, "id": "c"},
    ]
    write_file(tmp_path / "a.jsonl", lines(rows))
    assert main([str(tmp_path / "a.jsonl"), str(tmp_path / "out")]) == 0
    options = {"format": "jsonl", "path": str(tmp_path / "out" / "records.jsonl"), "task": "bmr"}
    source = open_source({**options, "image_root": str(tmp_path)})
    (part,) = source.scan(9).parts
    found = []
    for record in source.records(part):
        sample = source.sample(record, record.key)
        for name in sample.videos:
            with source.open_media(record, name)[1] as file:
                found.append(file.read())
    assert [record.key for record in source.records(part)][2] == "c"
    shown = [names, names[:2], names[2:], names]
    rates = [0.5, 2, 2, 4]
    for data, own, rate in zip(found, shown, rates, strict=True):
        header = read_video_header(io.BytesIO(data))
        assert read_mp4_header(io.BytesIO(data))[0] == header
        assert (header.num_frames, header.fps) == (len(own), rate)
        assert (header.width, header.height) == (64, 48)
        decoded = [np.asarray(one) for one in decode_frames(data, header, range(len(own)))]
        pictures = [np.asarray(Image.open(tmp_path / name).convert("RGB")) for name in own]
        apart = np.abs(np.array(decoded, np.int64) - np.array(pictures))
        assert (apart.max(), apart.mean()) <= DIFFERENCES[kind]
        assert apart.mean() <= DIFFERENCES[kind][1]
    first = json.loads((tmp_path / "out" / "records.jsonl").read_bytes().splitlines()[0])
    content = [{"type": "video", "video": "out/00000000.mp4", "fps": 1}]
    assert first["messages"][0]["content"] == content


def said(part: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [part]}, {"role": "assistant", "content": "It."}]


EXIF = Image.Exif()
EXIF[0x0112] = 6  # turned


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("b.jpg", lambda path: picture(0).save(path, exif=EXIF), "b.jpg is turned by EXIF"),
        ("b.png", lambda path: picture(0, "RGBA").save(path), "has the mode RGBA, or transparency"),
        ("b.jpg", lambda path: picture(0, "CMYK").save(path), "has the mode CMYK"),
        ("b.webp", lambda path: picture(0).save(path), "b.webp is WEBP; frames are JPEG or PNG"),
        ("b.jpg", lambda path: picture(0).save(path), r"is PNG \(64, 48\) RGB, but b.jpg is JPEG"),
        ("b.png", lambda path: picture(0, "RGB", (32, 48)).save(path), r"b.png is PNG \(32, 48\)"),
        ("gone.png", lambda path: None, "record a:1: missing_image"),
    ],
)
def test_frames_that_are_refused(
    name: str, make: Any, message: str, tmp_path: Path, capsys: Any
) -> None:
    make(tmp_path / name)
    rows = [{"messages": [], "videos": [[*frames(tmp_path, "png", 1), name]]}]
    write_file(tmp_path / "a.jsonl", lines(rows))
    assert main([str(tmp_path / "a.jsonl"), str(tmp_path / "out")]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out" / "records.jsonl").exists()


def test_names_start_where_they_did(tmp_path: Path, capsys: Any) -> None:
    """Videos beside the data are named alone; with other media they must lie in their folder."""
    data = tmp_path / "data"
    data.mkdir()
    names = frames(data, "png")
    rows: list[Any] = [{"messages": said({"type": "video", "video": names})}]
    write_json(data / "a.json", rows)
    assert main([str(data / "a.json"), str(tmp_path / "out")]) == 0
    assert f"source.image_root={tmp_path / 'out'}" in capsys.readouterr().out
    rows[0]["messages"][0]["content"].append({"type": "image", "image": names[0]})
    write_json(data / "a.json", rows)
    assert main([str(data / "a.json"), str(tmp_path / "other")]) == 1
    assert f"also names {names[0]!r}: choose a folder in {data}" in capsys.readouterr().err
    assert main([str(data / "a.json"), str(data / "joined")]) == 0


def test_records_of_frames_name_the_tool() -> None:
    for content in (
        {"messages": said({"type": "video", "video": ["0.jpg", "1.jpg"]})},
        {"messages": dialogue("<video>?", "It."), "videos": [["0.jpg", "1.jpg"]]},
        {"messages": dialogue("<video>?", "It."), "video": ["0.jpg", "1.jpg"]},
    ):
        with pytest.raises(SampleError, match=r"frames of videos; tools/join_frames.py makes vid"):
            to_sample(content, "a", "bmr")
