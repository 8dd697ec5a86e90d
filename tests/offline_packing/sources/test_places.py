"""Sources elsewhere (fsspec), of one's own (plug-in), and with fields of their own."""

from pathlib import Path

import fsspec
import pytest

from offline_packing.errors import ConfigError, StageError
from offline_packing.sources.roots.roots import RemoteRoot
from task_encoders.samples import SampleError
from tests.helpers import accounting, formats
from tests.helpers.datasets import image_bytes, make_run, outcomes, pack_all, write_json
from tests.helpers.formats import write_file

SAMPLES = formats.draw_samples(4) + [
    (f"v{key}", *rest) for key, *rest in formats.draw_video_samples(3, single=True)
]


@pytest.mark.parametrize(
    "name", ["pairs", "jsonl", "jsonl_gz", "json_array", "webdataset", "webdataset_gz", "parquet"]
)
def test_remote_sources(tmp_path: Path, name: str) -> None:
    local = formats.WRITERS[name](tmp_path / "data", SAMPLES)
    url = f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").put(str(tmp_path / "data"), url, recursive=True)
    path = local["path"].replace(str(tmp_path / "data"), url)
    sources = [accounting.open_one({**local, "path": at}, tmp_path) for at in (local["path"], path)]
    assert [outcome for _, outcome, _ in accounting.account(sources[1])] == ["ok"] * len(SAMPLES)
    here, there = map(accounting.measured_rows, sources)
    for row in (*here, *there):  # only what lies here has a modification time
        del row["stamp"]
    assert here == there


def test_remote_paths_stay_inside() -> None:
    fsspec.filesystem("memory").pipe("memory://inside/a.jpg", b"x")
    root, name = RemoteRoot.at("memory://inside")
    assert name is None
    assert root.locate("sub", "../a.jpg") == "a.jpg"
    for outside in ("../a.jpg", "/a.jpg", "sub/../../a.jpg"):
        with pytest.raises(SampleError, match="path_outside_root"):
            root.locate("", outside)
    with pytest.raises(StageError, match=r"does not exist; set source\.path"):
        RemoteRoot.at("memory://nowhere")
    with pytest.raises(ConfigError, match="cannot be opened"):
        RemoteRoot.at("nosuchstorage://bucket")


def test_plug_in_packs_like_any_other(tmp_path: Path) -> None:
    write_file(tmp_path / "data" / "a.jpg", image_bytes())
    lines = ['a.jpg,"What, then?",A square.', "nowhere.jpg,q,a", "too,few", 'a.jpg,q,"b ""c"""']
    write_file(tmp_path / "data" / "vqa.csv", "\n".join(lines).encode())
    source = {
        "format": "examples.csv_source:CsvSource",
        "path": str(tmp_path / "data" / "vqa.csv"),
        "task": "vqa",
    }
    run = make_run(source, tmp_path / "out", engine={"samples_per_part": 3})
    assert list(outcomes(run).values()).count("ok") == 2
    counts = pack_all(run).counts
    assert counts.packed == 2
    assert counts.set_aside == {"bad_record": 1, "missing_image": 1}


def test_fields_of_pairs(tmp_path: Path) -> None:
    record = {"captions": [{"content": "A square."}], "other": {"image": "x.jpg"}}
    write_json(tmp_path / "a.json", record)
    write_file(tmp_path / "x.jpg", image_bytes())
    config = {"format": "pairs", "path": str(tmp_path), "task": "captioning"}
    fields = {"caption": "captions[0].content", "images": "other.image"}
    ((_, outcome, row),) = accounting.account(
        accounting.open_one({**config, "fields": fields}, tmp_path)
    )
    assert outcome == "ok"
    assert row is not None
    assert row.media[0].container == "x.jpg"
    missing = {**config, "fields": {"caption": "captions[1].content"}}
    assert accounting.outcomes(missing, tmp_path) == {"a": "bad_record"}
