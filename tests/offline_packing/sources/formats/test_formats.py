"""Every format gives the samples that were written, as do our packs of them. Folders of images and
videos with captions in text files."""

from pathlib import Path

import pytest

from offline_packing.layouts.shards import COLUMNS, read_planned
from offline_packing.measure.measure import measure
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run, open_sources
from offline_packing.sources import SOURCES
from offline_packing.sources.recognise import recognise
from task_encoders.samples import SourceSample
from tests.helpers import formats
from tests.helpers.accounting import open_one, outcomes, turns_in
from tests.helpers.datasets import image_bytes, index_rows, make_run, pack_all
from tests.helpers.formats import write_file
from tests.helpers.videos import make_video


def read_back(run: Run) -> dict[str, tuple[SourceSample, list[bytes], int]]:
    """Measure, then read every sample from nothing but its row: (sample, images, tokens) by key."""
    assert measure(run).info.set_aside == {}
    (source,) = open_sources(run.config)
    found = {}
    for row, one in zip(
        index_rows(run), read_planned(open_index(run).table(*COLUMNS)), strict=True
    ):
        media = [source.read_media(medium) for medium in one.media]
        assert list(one.extensions) == list(map(formats.suffix_of, media))
        sample = source.read_sample(row["key"], one.json, row["num_images"], row["num_videos"])
        found[row["key"]] = (sample, media, one.num_tokens)
    return found


def test_every_format_has_a_writer(tmp_path: Path) -> None:
    samples = formats.draw_samples(1)
    used = {write(tmp_path / name, samples)["format"] for name, write in formats.WRITERS.items()}
    assert used | {"text", "captions"} == set(SOURCES)  # which hold no dialogues


#: With one medium each, for formats that can name one only; and with several.
SINGLE, SEVERAL = (
    formats.draw_samples(6)
    + [(f"v{key}", *rest) for key, *rest in formats.draw_video_samples(6, single=single)]
    for single in (True, False)
)
MODEL = {"video_min_pixels": 28 * 28, "video_max_pixels": 28 * 28 * 9}


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """Tokens of each sample, as read from pairs and from lines; by the list's identity."""
    found = {}
    for samples, write in ((SINGLE, formats.pairs), (SEVERAL, formats.jsonl)):
        folder = tmp_path_factory.mktemp("plain")
        source = {**write(folder / "data", samples), "task": "bmr"}
        rows = read_back(make_run(source, folder / "out", model=MODEL)).values()
        found[id(samples)] = [tokens for *_, tokens in rows]
    return found


@pytest.mark.parametrize("name", formats.WRITERS)
def test_samples_come_out_as_they_went_in(
    tmp_path: Path, name: str, lengths: dict[int, list[int]]
) -> None:
    samples = SINGLE if name in ("pairs", "json_array") else SEVERAL
    source = {**formats.WRITERS[name](tmp_path / "data", samples), "task": "bmr"}
    run = make_run(source, tmp_path / "out", model=MODEL, engine={"samples_per_part": 4})
    found = read_back(run)
    texts = [[(turn.prompt, turn.answer) for turn in sample.turns] for sample, *_ in found.values()]
    assert texts == [[(one["content"], two["content"])] for _, (one, two), _ in samples]
    assert [media for _, media, _ in found.values()] == [media for *_, media in samples]
    assert [tokens for *_, tokens in found.values()] == lengths[id(samples)]
    keys = [key.rpartition("/")[2] for key in found]
    if name not in ("packs", "raw_packing_data"):  # packs of others have no keys
        assert keys == [key for key, *_ in samples]
    if name == "jsonl":
        assert pack_all(run).counts.packed == len(samples)
        again = {"format": "packs", "path": str(tmp_path / "out"), "task": "bmr"}
        unpacked = read_back(make_run(again, tmp_path / "again", model=MODEL))
        repacked = {key: value[1:] for key, value in unpacked.items()}
        assert repacked == {key: value[1:] for key, value in found.items()}


def test_each_caption_is_a_sample_or_has_a_reason(tmp_path: Path) -> None:
    files = {
        "a.jpg": image_bytes(), "a.txt": b"A cat.\n", "b/c.PNG": image_bytes(56, 84, "PNG"),
        "b/c.TXT": b"\xef\xbb\xbfA dog.", "v.mp4": make_video(4), "v.txt": "Läuft.".encode(),
        "none.txt": b"Nothing beside it.", "left.jpg": image_bytes(), "twice.jpg": image_bytes(),
        "twice.png": image_bytes(), "twice.txt": b"Which?", "latin.jpg": image_bytes(),
        "latin.txt": b"\xe4", "empty.jpg": image_bytes(), "empty.txt": b" ", "a.json": b"{}",
    }  # fmt: skip
    for name, data in files.items():
        write_file(tmp_path / "data" / name, data)
    source = {"format": "captions", "path": str(tmp_path / "data"), "task": "captioning"}
    assert outcomes(source, tmp_path) == {
        **dict.fromkeys(("a", "b/c", "v"), "ok"), "none": "missing_image",
        "twice": "ambiguous_image", "latin": "bad_json", "empty": "empty_answer",
    }  # fmt: skip
    answers = {key: turns[0][1] for key, turns in turns_in(source, tmp_path).items()}
    assert answers == {"a": "A cat.", "b/c": "A dog.", "v": "Läuft."}
    assert len(open_one(source, tmp_path).scan(9).unpaired_media) == 1
    (tmp_path / "data/a.json").unlink()
    assert recognise(str(tmp_path / "data")).options == source
