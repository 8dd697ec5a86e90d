"""Documents from their files to packs and batches: pictures stay in their places, and long ones are
cut so that each token, and each picture, is trained once."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from offline_packing.cli.starter import render_config
from offline_packing.config.packing import parse_config
from offline_packing.engines.local import LocalEngine
from offline_packing.errors import StageError
from offline_packing.export.raw_packs import export
from offline_packing.report.preview import preview
from offline_packing.report.preview_text import render_pack
from offline_packing.runs.run import Run, open_encoder
from offline_packing.runs.set_aside import list_set_aside
from offline_packing.sources.recognise import recognise
from offline_packing.verify.verify import verify
from task_encoders.records.record import to_sample
from task_encoders.samples import SourceSample, split_at_media
from tests.helpers.datasets import WORDS, image_bytes, make_run, outcomes, pack_all, packed_run
from tests.helpers.formats import lines, write_file
from tests.helpers.outputs import samples_of, set_aside_in_plan

NUM_PICTURES = 6
PICTURES = [image_bytes(56 + 28 * i, 84) for i in range(NUM_PICTURES)]


def pictures(folder: Path) -> None:
    for i, data in enumerate(PICTURES):
        write_file(folder / f"{i}.jpg", data)


def documents(count: int, most: int = 30) -> list[dict[str, Any]]:
    """Documents of at most `most` paragraphs, every third with a picture in front."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(count):
        text, names = "", list[str]()
        for k in range(int(rng.integers(1, most + 1))):
            if k % 3 == 0:
                text += "<image>"
                names.append(f"{rng.integers(NUM_PICTURES)}.jpg")
            words = " ".join(rng.choice(WORDS, rng.integers(3, 40)))
            text += f"{words} {k} of {i}.{('', chr(10) * 2)[int(rng.integers(2))]}"
        found.append({"id": f"d{i}", "text": text, "images": names})
    return found


def run_of(folder: Path, records: list[dict[str, Any]], **sections: Any) -> Run:
    write_file(folder / "data" / "a.jsonl", lines(records))
    pictures(folder / "data")
    source = {"format": "jsonl", "path": str(folder / "data"), "task": "captioning"}
    pack = {"seq_length": 256, "max_set_aside": 1, **sections.pop("pack", {})}
    return make_run(source, folder / "out", pack=pack, **sections)


def shown(sample: SourceSample) -> list[str]:
    """Texts of a caption, and between them its placeholders."""
    return split_at_media(sample, sample.turns[0].answer)


def test_pictures_stand_where_they_are_named(tmp_path: Path) -> None:
    """In packs, in verify, in the preview; records whose numbers disagree are set aside."""
    records = [
        {"id": "a", "text": "Intro <image> middle <image> end", "images": ["0.jpg", "1.jpg"]},
        {"id": "b", "text": "Alone", "images": ["2.jpg"]},
        {"id": "c", "text": "One <image>", "images": ["0.jpg", "1.jpg"]},
        {"id": "d", "text": "One <image> of none"},
    ]
    run = run_of(tmp_path, records)
    assert outcomes(run) == {
        "a": "ok",
        "b": "ok",
        "c": "image_count_mismatch",
        "d": "image_count_mismatch",
    }
    pack_all(run)
    assert verify(run, deep=True).problems == []
    (_, a, media), (_, b, alone) = sorted(samples_of(run), key=lambda one: one[1].key)
    assert shown(a) == ["Intro ", "<image>", " middle ", "<image>", " end"]
    assert (media, alone) == (PICTURES[:2], PICTURES[2:3])
    assert shown(b) == ["Alone"]
    text = "".join(render_pack(pack) for pack in preview(run))
    assert re.search(r"Intro .*\[image 6x4.*middle.*\[image 6x6.*end", text, re.DOTALL), text
    assert "[text: <image>]" not in text


def test_long_documents_are_cut(tmp_path: Path) -> None:
    """Every token that carries loss is trained once, but the end tokens of parts that go on; every
    picture stands in front of its own paragraph."""
    records = documents(30)
    run = run_of(tmp_path, records, pack={"on_overlong": "split_turns"})
    manifest = pack_all(run)
    assert verify(run, deep=True).problems == []
    assert not set_aside_in_plan(run)
    encoder = open_encoder(run.config.model)
    parts: dict[str, list[tuple[int, SourceSample, list[bytes]]]] = {}
    for _, sample, media in samples_of(run):
        key, _, cut = sample.key.partition("[")
        parts.setdefault(key, []).append((int(cut.partition(":")[0] or 0), sample, media))
    assert parts.keys() == {one["id"] for one in records}
    num_cut = 0
    for record in records:
        own = [one[1:] for one in sorted(parts[record["id"]], key=lambda one: one[0])]
        num_cut += len(own) > 1
        assert "".join(one.turns[0].answer for one, _ in own) == record["text"]
        assert [data for _, media in own for data in media] == [
            PICTURES[int(name[0])] for name in record["images"]
        ]
        assert [one.turns[0].truncated for one, _ in own] == [True] * (len(own) - 1) + [False]
        ids = [token for one, _ in own for token in encoder.tokenize(one).ids]
        assert ids == encoder.tokenize(to_sample(record, "k", "captioning")).ids
    assert num_cut > 10
    assert manifest.counts.records["packed"] == len(records)


def test_what_takes_no_documents(tmp_path: Path) -> None:
    """Two layouts take texts alone, and an export nothing; packs are read again as they are."""
    records = [
        {"id": "a", "text": "One <image> two", "images": ["0.jpg"]},
        {"id": "b", "text": "Alone", "images": ["2.jpg"]},
    ]
    for layout in ("loongforge", "llava_onevision"):
        run = run_of(tmp_path / layout, records, output={"layout": layout})
        pack_all(run)
        (lost,) = set_aside_in_plan(run)
        assert lost["key"] == "a"
        assert "<image> in an answer or document" in lost["detail"]
    run = run_of(tmp_path, documents(8), pack={"on_overlong": "split_turns"})
    pack_all(run)
    with pytest.raises(StageError, match="holds a document, or a part of one, 'd"):
        export(run.workspace.root, tmp_path / "files", progress=False)
    source = {"format": "packs", "path": str(run.workspace.root), "task": "captioning"}
    again = packed_run(source, tmp_path / "again", pack={"seq_length": 256})
    first, second = (
        sorted((sample.key, sample.turns, media) for _, sample, media in samples_of(one))
        for one in (run, again)
    )
    assert first == second
    assert any(turns[0].truncated for _, turns, _ in first)


def obelics(folder: Path) -> None:
    """Rows with bytes in the place of addresses."""
    image = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
    names = [[None, 0, None], [1, None, 2]]
    images = [
        [None if i is None else {"bytes": PICTURES[i], "path": None} for i in row] for row in names
    ]
    texts = [["Intro.", None, "End."], [None, "Two.", None]]
    table = pa.table({"images": pa.array(images, pa.list_(image)), "texts": texts})
    write_file(folder / "README.md", b"")
    pq.write_table(table, folder / "train.parquet")


def obelics_lines(folder: Path) -> None:
    """Lines with names in the place of addresses."""
    rows = [
        {"texts": ["Intro.", None, "End."], "images": [None, "0.jpg", None]},
        {"texts": [None, "Two.", None], "images": ["1.jpg", None, "2.jpg"]},
    ]
    write_file(folder / "a.jsonl", lines(rows))
    pictures(folder)


def mmc4(folder: Path) -> None:
    rows = [
        {
            "text_list": ["Intro.", "End."],
            "image_info": [{"image_name": "0.jpg", "matched_text_index": 1, "raw_url": "http://a"}],
            "url": "http://b",
        },
        {
            "text_list": ["Two.", "Three."],
            "image_info": [
                {"image_name": "2.jpg", "matched_text_index": 1},
                {"image_name": "1.jpg", "matched_text_index": 0},
            ],
        },
    ]
    write_file(folder / "a.jsonl", lines(rows))
    pictures(folder)


def ms_swift(folder: Path) -> None:
    said = ["Intro.<image>End.", "<image>Two.<image>"]
    names = [["0.jpg"], ["1.jpg", "2.jpg"]]
    rows = [
        {"messages": [{"role": "assistant", "content": text}], "images": own}
        for text, own in zip(said, names, strict=True)
    ]
    write_file(folder / "a.jsonl", lines(rows))
    pictures(folder)


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (obelics, ["Intro.<image>End.", "<image>Two.<image>"]),
        (obelics_lines, ["Intro.<image>End.", "<image>Two.<image>"]),
        (mmc4, ["Intro. <image>End.", "<image>Two. <image>Three."]),
        (ms_swift, ["Intro.<image>End.", "<image>Two.<image>"]),
    ],
)
def test_data_sets_as_they_are(write: Any, texts: list[str], tmp_path: Path) -> None:
    """`init` picks the task, and the configuration that it writes packs all."""
    write(tmp_path / "data")
    found = recognise(str(tmp_path / "data"))
    assert found.options["task"] == "captioning"
    assert [line for example in found.examples for line in example.lost] == []
    config = parse_config(yaml.safe_load(render_config(found, str(tmp_path / "out"))))
    run = Run(config, LocalEngine(0))
    pack_all(run)
    assert verify(run, deep=True).problems == []
    samples = sorted(samples_of(run), key=lambda one: texts.index(one[1].turns[0].answer))
    assert [sample.turns[0].answer for _, sample, _ in samples] == texts
    assert [media for *_, media in samples] == [PICTURES[:1], PICTURES[1:3]]


def test_addresses_are_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, [{"id": "a", "texts": ["One."], "images": ["https://a.b/c.jpg"]}])
    assert outcomes(run) == {"a": "missing_image"}
    assert "for example with img2dataset, and name the file" in "".join(list_set_aside(run))
