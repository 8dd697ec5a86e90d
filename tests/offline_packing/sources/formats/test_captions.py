"""Folders of images and videos with captions in text files."""

from pathlib import Path

import pytest

from offline_packing.sources.recognise import recognise
from offline_packing.verify.verify import verify
from tests.helpers import accounting
from tests.helpers.datasets import image_bytes, packed_run
from tests.helpers.formats import write_file
from tests.helpers.videos import make_video


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "a.jpg": image_bytes(), "a.txt": b"A cat.\n", "b/c.PNG": image_bytes(56, 84, "PNG"),
        "b/c.TXT": b"\xef\xbb\xbfA dog.", "v.mp4": make_video(4), "v.txt": "Läuft.".encode(),
        "none.txt": b"Nothing beside it.", "left.jpg": image_bytes(), "twice.jpg": image_bytes(),
        "twice.png": image_bytes(), "twice.txt": b"Which?", "latin.jpg": image_bytes(),
        "latin.txt": b"\xe4", "empty.jpg": image_bytes(), "empty.txt": b" ", "a.json": b"{}",
    }  # fmt: skip
    for name, data in files.items():
        write_file(tmp_path / "data" / name, data)
    return tmp_path / "data"


def test_each_text_is_a_sample_or_has_a_reason(folder: Path, tmp_path: Path) -> None:
    source = {"format": "captions", "path": str(folder), "task": "captioning"}
    assert accounting.outcomes(source, tmp_path) == {
        **dict.fromkeys(("a", "b/c", "v"), "ok"), "none": "missing_image",
        "twice": "ambiguous_image", "latin": "bad_json", "empty": "empty_answer",
    }  # fmt: skip
    opened = accounting.open_one(source, tmp_path)
    rows = {row.key: row for *_, row in accounting.account(opened) if row is not None}
    texts = {
        key: opened.read_sample(key, row.json, len(row.media) - row.num_videos, row.num_videos)
        for key, row in rows.items()
    }
    answers = {key: sample.turns[0].answer for key, sample in texts.items()}
    assert answers == {"a": "A cat.", "b/c": "A dog.", "v": "Läuft."}
    assert len(opened.scan(9).unpaired_media) == 1


def test_init_to_packs(folder: Path, tmp_path: Path) -> None:
    (folder / "a.json").unlink()
    options = recognise(str(folder)).options
    assert options == {"format": "captions", "path": str(folder), "task": "captioning"}
    run = packed_run(options, tmp_path / "out", pack={"seq_length": 512, "max_set_aside": 0.9})
    assert verify(run, deep=True).ok
