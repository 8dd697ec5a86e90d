"""Every format gives the same samples, and they come out of the packs as they went in. Folders of
images and videos with captions in text files."""

from pathlib import Path
from typing import Any

import pytest

from offline_packing.index.table import Index
from offline_packing.measure.measure import measure
from offline_packing.runs.run import Run, open_sources
from offline_packing.sources import SOURCES, Locator
from offline_packing.sources.recognise import recognise
from offline_packing.verify.verify import verify
from task_encoders.samples import SourceSample
from tests.helpers import formats
from tests.helpers.accounting import open_one, outcomes, turns_in
from tests.helpers.datasets import image_bytes, make_run, pack_all
from tests.helpers.formats import Sample, write_file
from tests.helpers.videos import make_video

SAMPLES = formats.draw_samples(11)


def read_back(run: Run) -> dict[str, tuple[SourceSample, list[bytes], int]]:
    """Measure, then read every sample from nothing but its row: (sample, images, tokens) by key."""
    info = measure(run).info
    assert info.set_aside == {}
    (source,) = open_sources(run.config)
    found = {}
    for row in Index(run.workspace.index, info).table().to_pylist():
        media = [dict(medium) for medium in row["media"]]
        extensions = [medium.pop("extension") for medium in media]
        assert extensions == [formats.suffix_of(source.read_media(at(m))) for m in media]
        images = [source.read_media(at(medium)) for medium in media]
        sample = source.read_sample(
            row["key"], at(row["json"]), row["num_images"], row["num_videos"]
        )
        found[row["key"]] = (sample, images, row["num_tokens"])
    assert len(found) == info.num_samples
    return found


def at(row: dict[str, Any]) -> Locator:
    return Locator(**row)


def text_of(sample: SourceSample) -> list[str]:
    return [text for turn in sample.turns for text in (turn.prompt, turn.answer)]


def expected_texts(samples: list[Sample]) -> list[list[str]]:
    return [[message["content"] for message in messages] for _, messages, _ in samples]


def test_every_format_has_a_writer(tmp_path: Path) -> None:
    used = {
        write(tmp_path / name, SAMPLES[:1])["format"] for name, write in formats.WRITERS.items()
    }
    assert used | {"text", "captions"} == set(SOURCES)  # which hold no dialogues


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Tokens of each sample, as pairs."""
    folder = tmp_path_factory.mktemp("plain")
    plain = {**formats.pairs(folder / "pairs", SAMPLES), "task": "bmr"}
    return [tokens for *_, tokens in read_back(make_run(plain, folder / "out")).values()]


@pytest.mark.parametrize("name", formats.WRITERS)
def test_samples_are_read_again(tmp_path: Path, name: str, lengths: list[int]) -> None:
    source = {**formats.WRITERS[name](tmp_path / "data", SAMPLES), "task": "bmr"}
    found = read_back(make_run(source, tmp_path / "out", engine={"samples_per_part": 4}))
    assert [text_of(sample) for sample, _, _ in found.values()] == expected_texts(SAMPLES)
    assert [images for _, images, _ in found.values()] == [images for *_, images in SAMPLES]
    assert [tokens for *_, tokens in found.values()] == lengths
    keys = [key.rpartition("/")[2] for key in found]
    if name not in ("packs", "raw_packing_data"):  # packs of others have no keys
        assert keys == [key for key, *_ in SAMPLES]


#: Of formats that can name one medium, and of the others.
VIDEO_SAMPLES = formats.draw_video_samples(5, single=True)
MIXED_SAMPLES = formats.draw_video_samples(6, single=False)
ONE_MEDIUM_ONLY = ("pairs", "json_array")


@pytest.mark.parametrize("name", formats.WRITERS)
def test_videos_of_every_format_come_out_as_they_went_in(tmp_path: Path, name: str) -> None:
    samples = VIDEO_SAMPLES if name in ONE_MEDIUM_ONLY else MIXED_SAMPLES
    source = {**formats.WRITERS[name](tmp_path / "data", samples), "task": "bmr"}
    model = {"video_min_pixels": 28 * 28, "video_max_pixels": 28 * 28 * 9}
    run = make_run(source, tmp_path / "out", model=model, engine={"samples_per_part": 4})
    found = read_back(run)
    assert [text_of(sample) for sample, _, _ in found.values()] == expected_texts(samples)
    assert [media for _, media, _ in found.values()] == [media for *_, media in samples]
    assert pack_all(run).counts.packed == len(samples)
    result = verify(run, deep=True)
    assert result.ok, result.problems
    assert result.num_videos == sum(
        formats.field_of(formats.suffix_of(m)) == "videos" for *_, media in samples for m in media
    )
    again = {"format": "packs", "path": str(tmp_path / "out"), "task": "bmr"}
    unpacked = read_back(make_run(again, tmp_path / "again", model=model))
    repacked = {key: value[1:] for key, value in unpacked.items()}
    assert repacked == {key: value[1:] for key, value in found.items()}


@pytest.fixture
def captions_of_all_kinds(tmp_path: Path) -> Path:
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


def test_each_caption_is_a_sample_or_has_a_reason(
    captions_of_all_kinds: Path, tmp_path: Path
) -> None:
    source = {"format": "captions", "path": str(captions_of_all_kinds), "task": "captioning"}
    assert outcomes(source, tmp_path) == {
        **dict.fromkeys(("a", "b/c", "v"), "ok"), "none": "missing_image",
        "twice": "ambiguous_image", "latin": "bad_json", "empty": "empty_answer",
    }  # fmt: skip
    answers = {key: turns[0][1] for key, turns in turns_in(source, tmp_path).items()}
    assert answers == {"a": "A cat.", "b/c": "A dog.", "v": "Läuft."}
    assert len(open_one(source, tmp_path).scan(9).unpaired_media) == 1
    (captions_of_all_kinds / "a.json").unlink()
    assert recognise(str(captions_of_all_kinds)).options == source
