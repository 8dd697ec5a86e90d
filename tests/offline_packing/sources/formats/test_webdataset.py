"""Tars whose keys have dots: no sample is lost uncounted or doubled, and each has its media."""

import gzip
import io
import json
import math
import time
from pathlib import Path

import pytest

from offline_packing.measure.measure import measure
from offline_packing.sources.formats import webdataset
from offline_packing.sources.formats.webdataset import group_members
from tests.helpers.accounting import account, open_one
from tests.helpers.datasets import image_bytes, make_run
from tests.helpers.formats import tar_bytes, write_file

ASIDE = "bad_record"
WHOLE = "ambiguous_image"  # a sample with several media, of which its record names none

#: Members -> the media of each sample, or why a key is set aside. `a.json:x.jpg,y.jpg` names media.
TABLE = """
# split: several records that own media
v1.0.jpg v1.0.json v1.1.jpg v1.1.json -> v1.0 = v1.0.jpg; v1.1 = v1.1.jpg
v1.0.json v1.0.jpg v1.1.json v1.1.jpg -> v1.0 = v1.0.jpg; v1.1 = v1.1.jpg
v1.0.json v1.1.json v1.0.jpg v1.1.jpg -> v1.0 = v1.0.jpg; v1.1 = v1.1.jpg
v1.0.jpg v1.1.jpg v1.1.json v1.0.json -> v1.0 = v1.0.jpg; v1.1 = v1.1.jpg
d/v1.0.jpg d/v1.0.json d/v1.1.jpg d/v1.1.json -> d/v1.0 = d/v1.0.jpg; d/v1.1 = d/v1.1.jpg
./v1.0.jpg ./v1.0.json ./v1.1.jpg ./v1.1.json -> v1.0 = v1.0.jpg; v1.1 = v1.1.jpg
2024.05.01.a.jpg 2024.05.01.a.json 2024.05.02.b.JPG 2024.05.02.b.JSON \
-> 2024.05.01.a = 2024.05.01.a.jpg; 2024.05.02.b = 2024.05.02.b.JPG
a.IMG0.JPG a.IMG1.PNG a.JSON:img1.png,img0.jpg a.Txt -> a = a.IMG1.PNG a.IMG0.JPG
v1.0.jpg v1.0.json:v1.0.jpg v1.1.png v1.1.json:v1.1.png -> v1.0 = v1.0.jpg; v1.1 = v1.1.png
v1.0.a.jpg v1.0.b.jpg v1.0.json:a.jpg,b.jpg v1.1.jpg v1.1.json:jpg \
-> v1.0 = v1.0.a.jpg v1.0.b.jpg; v1.1 = v1.1.jpg
v1.0.a.jpg v1.0.b.jpg v1.0.json v1.1.jpg v1.1.json -> v1.0 = ambiguous_image; v1.1 = v1.1.jpg
v1.0.jpg v1.0.json v1.0.5.jpg v1.0.5.json -> v1.0 = v1.0.jpg; v1.0.5 = v1.0.5.jpg
v1.0.jpg v1.0.json v1.00.jpg v1.00.json -> v1.0 = v1.0.jpg; v1.00 = v1.00.jpg
v1.0.jpg v1.0.txt v1.0.json v1.1.jpg v1.1.json -> v1.0 = v1.0.jpg; v1.1 = v1.1.jpg
v1.0.jpg v1.0.json v1.0.npy v1.1.npy v1.1.jpg v1.1.json -> v1.0 = v1.0.jpg; v1.1 = v1.1.jpg
# a record without a medium, and media without a record
v1.0.jpg v1.0.json v1.1.jpg v1.1.json v1.2.json -> v1.0 = v1.0.jpg; v1.1 = v1.1.jpg; v1.2 =
v1.0.jpg v1.0.json v1.1.jpg v1.1.json v1.2.jpg v1.3.jpg \
-> v1.0 = v1.0.jpg; v1.1 = v1.1.jpg; v1.2.jpg = bad_record; v1.3.jpg = bad_record
v1.0.jpg v1.0.json v1.1.jpg -> v1.0 = v1.0.jpg; v1.1.jpg = bad_record
v1.jpg v1.0.jpg v1.0.json -> v1.jpg = bad_record; v1.0 = v1.0.jpg
# split: no media at all
v1.0.json v1.1.json v1.2.json -> v1.0 =; v1.1 =; v1.2 =
# WebDataset's groups
k.a.jpg k.b.jpg k.json:a.jpg,b.jpg -> k = k.a.jpg k.b.jpg
k.jpg k.json k.txt -> k = k.jpg
k.jpg k.json k.seg.png -> k = ambiguous_image
k.seg.png k.cls.txt -> k = bad_record
k.jpg k.meta.json -> k = k.jpg
k.x.jpg k.x.json -> k = k.x.jpg
k.jpg k.json k.meta.json -> k = k.jpg
k.x.jpg k.x.json k.y.json -> k = k.x.jpg
k.jpg j.jpg j.json -> k = bad_record; j = j.jpg
# groups that stay whole, with records that no sample has
k.json k.x.json -> k =; k.x = bad_record
k.jpg k.json:jpg k.x.jpg k.x.json k.y.jpg k.y.json -> k = k.jpg; k.x = bad_record; k.y = bad_record
k.x.json k.y.json k.z.jpg -> k = k.z.jpg; k.y = bad_record
k.y.json k.x.json k.x.jpg -> k = k.x.jpg; k.x = bad_record
k.x.jpg.json k.y.jpg.json k.x.jpg k.y.jpg -> k = ambiguous_image; k.y.jpg = bad_record
k.x.txt k.y.txt k.z.jpg -> k = bad_record; k.y = bad_record
"""
FORMS = {
    form: {key: media.strip() for key, _, media in (one.partition(" =") for one in own.split("; "))}
    for form, _, own in (line.partition(" -> ") for line in TABLE.splitlines())
    if own
}


def members_of(form: str) -> list[tuple[str, bytes]]:
    """Pictures that differ, and records whose answer is their name."""
    members = []
    for number, given in enumerate(form.split()):
        name, _, media = given.partition(":")
        content = image_bytes(shade=number)
        if name.lower().endswith(".json"):
            record = {"question": "What?", "answer": name.removeprefix("./")}
            if media:
                images = media.split(",")
                record |= {"images": images, "question": "<image>" * len(images)}
            content = json.dumps(record).encode()
        elif name.endswith(".txt"):
            content = b"A caption."
        members.append((name, content))
    return members


def found_in(path: Path, members: list[tuple[str, bytes]]) -> tuple[dict[str, str], list[str]]:
    """Samples, media and set-asides are those of `FORMS`; locators give every answer again."""
    names = {content: name.removeprefix("./") for name, content in members}
    data = tar_bytes(members)
    write_file(path, gzip.compress(data) if path.suffix == ".gz" else data)
    source = open_one({"format": "webdataset", "path": str(path), "task": "vqa"}, path.parent)
    found, answers = dict[str, str](), list[str]()
    rows = account(source)
    for key, outcome, row in rows:
        key = key.removeprefix("a/")
        found[key] = outcome
        if row is not None:
            sample = source.read_sample(key, row.json, len(row.media))
            answers.append(sample.turns[0].answer)
            found[key] = " ".join(names[source.read_media(medium)] for medium in row.media)
    assert len(found) == len(rows)
    return found, answers


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
@pytest.mark.parametrize("form", FORMS)
def test_each_record_is_one_sample_or_counted(tmp_path: Path, form: str, name: str) -> None:
    assert len(FORMS) >= 30
    found, answers = found_in(tmp_path / name, members_of(form))
    assert found == FORMS[form]
    assert len(set(answers)) == len(answers)
    for key, media in found.items():
        if media not in (ASIDE, WHOLE) and f"{key}.json" in form:
            assert f"{key}.json" in answers


@pytest.mark.parametrize(
    ("form", "warning"),
    [
        ("k.jpg k.json k.meta.json", "'k' 'meta.json'"),
        ("k.x.jpg k.x.json k.y.json", "'k' 'y.json'"),
        ("k.jpg k.json k.txt", ""),
        ("v1.0.jpg v1.0.json v1.1.jpg v1.1.json", ""),
    ],
)
def test_records_that_are_not_read_are_warned_of(tmp_path: Path, form: str, warning: str) -> None:
    write_file(tmp_path / "data" / "a.tar", tar_bytes(members_of(form)))
    source = {"format": "webdataset", "path": str(tmp_path / "data"), "task": "vqa"}
    warnings = measure(make_run(source, tmp_path / "out")).info.warnings
    expected = f"field {warning.split()[1]} holds text that no sample uses" if warning else None
    assert [line.partition(" (")[0] for line in warnings] == ([expected] if expected else [])


PAIRS = " ".join(f"v1.{i}.jpg v1.{i}.json" for i in range(6))
EACH = {f"v1.{i}": f"v1.{i}.jpg" for i in range(6)}
SIZE = len(image_bytes())


@pytest.mark.parametrize(
    ("form", "pictures", "expected"),
    [
        (PAIRS, 2.5, EACH),
        (PAIRS, 3.5, EACH),
        (" ".join(f"v1.{i}.json v1.{i}.jpg" for i in range(6)), 2.5, EACH),
        (f"{PAIRS} v1.json", 2.5, {**EACH, "v1": ASIDE}),
        (f"v1.6.jpg {PAIRS} v1.6.json", 3.5, {**EACH, "v1.6": "v1.6.jpg"}),
        (f"{PAIRS} v1.0.b.jpg", 2.5, {**EACH, "v1.0.b.jpg": ASIDE}),
        # nothing can be told of media before their records: none is lost uncounted
        (
            " ".join(f"v1.{i}.jpg" for i in range(4)) + " v1.1.json v1.0.json v1.3.json v1.2.json",
            2.5,
            {"v1.1": "v1.1.jpg", "v1.0": "v1.0.jpg", **dict.fromkeys(("v1.3", "v1.2"), "")},
        ),
    ],
)
def test_compressed_tars_are_split_with_what_has_arrived(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    pictures: float,
    expected: dict[str, str],
) -> None:
    monkeypatch.setattr(webdataset, "_MOST_KEPT", int(pictures * SIZE))
    found, _ = found_in(tmp_path / "a.tar.gz", members_of(form))
    lost = {key: reason for key, reason in found.items() if reason == "too_costly"}
    assert {**found, **lost} == {key: lost.get(key, media) for key, media in expected.items()}
    assert bool(lost) == ("" in expected.values())


@pytest.mark.parametrize("format_name", ["energon", "packs"])
def test_other_formats_keep_the_first_dot(tmp_path: Path, format_name: str) -> None:
    write_file(tmp_path / "a.tar", tar_bytes(members_of(PAIRS)))
    description = b"__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    write_file(tmp_path / ".nv-meta" / "dataset.yaml", description)
    write_file(tmp_path / ".nv-meta" / "split.yaml", b"split_parts: {train: [a.tar]}\n")
    source = open_one({"format": format_name, "path": str(tmp_path), "task": "vqa"}, tmp_path)
    assert [key for key, *_ in account(source)] == ["a/v1"]


class Stream(io.BytesIO):
    """Bytes that are read from front to back, as of a compressed file."""

    def seekable(self) -> bool:
        return False


def test_time_does_not_grow_with_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stems times media, and with media that are held because their records may follow."""
    pairs = [(f"k.{i}.{end}", b"x" * 100) for i in range(1000, 6000) for end in ("jpg", "json")]
    held = [(f"k.{i}.jpg", b"x" * 100) for i in range(1000)] + pairs[:1000]
    for members, most in ((pairs, math.inf), (held, 100_300), (held, 225_000)):
        monkeypatch.setattr(webdataset, "_MOST_KEPT", most)
        file = Stream(tar_bytes(members))
        begin = time.process_time()
        found = [*group_members("a.tar.gz", file, split=True)]
        assert time.process_time() - begin < 1.25
        assert sum(len(one.members) for one in found) == len(members)
