"""`init`: every format is recognised by what lies there, and what is written can be run."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from offline_packing.cli.commands import cli
from offline_packing.config.packing import load_config
from offline_packing.measure.measure import measure
from offline_packing.sources.recognise import recognise
from tests.helpers import formats
from tests.helpers.command import Command, invoke
from tests.helpers.datasets import captioning_pairs, dialogue, make_run, write_json
from tests.helpers.formats import lines, tar_bytes, write_file
from tests.helpers.tiny_families import save_tokenizer

SAMPLES = formats.draw_samples(4)


@pytest.mark.parametrize("name", formats.WRITERS)
def test_formats_are_recognised(name: str, tmp_path: Path) -> None:
    source = formats.WRITERS[name](tmp_path / "data", SAMPLES)
    found = recognise(str(source["path"]), task="bmr")
    expected = {**source, "task": "bmr"}
    assert {key: found.options[key] for key in expected} == expected
    assert found.others == ()
    assert [example.problem for example in found.examples] == ["", "", ""]
    assert all(example.sample and not example.missing for example in found.examples)


def test_the_task_is_told_from_the_records(tmp_path: Path) -> None:
    tasks = {}
    for name, record in (
        ("dialogues", {"messages": dialogue("a", "b")}),
        ("questions", {"question": "a", "answer": "b"}),
        ("captions", {"caption": "b"}),
    ):
        write_file(tmp_path / name / "a.jsonl", lines([record] * 4))
        options = recognise(str(tmp_path / name)).options
        tasks[name] = options["task"]
        assert options.get("text_only", False) == (name != "dialogues")
    write_file(tmp_path / "text" / "a.txt", b"One line.\nTwo lines.\n")
    tasks["text"] = recognise(str(tmp_path / "text")).options["task"]
    assert tasks == {
        "dialogues": "bmr",
        "questions": "vqa",
        "captions": "captioning",
        "text": "captioning",
    }


def test_what_is_not_found_or_not_read_is_shown(tmp_path: Path) -> None:
    image = formats.draw_samples(1)[0][2][0]
    write_file(tmp_path / "data" / "images" / "a.jpg", image)
    record = {"caption": "A.", "image": "a.jpg", "hue": "red"}
    write_file(
        tmp_path / "data" / "text" / "a.jsonl", lines([record, {**record, "image": "b.jpg"}])
    )
    to = tmp_path / "pack.yaml"
    result = invoke("init", tmp_path / "data" / "text", "--to", to)
    assert "not read: hue" in result.output
    assert "a.jpg (found)" in result.output
    assert "b.jpg (NOT FOUND)" in result.output
    assert "image_root" in to.read_text()


def test_pictures_that_no_sample_uses_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """init, run: as somebody would who has not read the guide."""
    monkeypatch.chdir(tmp_path)
    picture = formats.draw_samples(1)[0][2][0]
    records = [
        {"image_path": f"p/{i}.jpg", "question": "What?", "answer": "This."} for i in range(4)
    ]
    for i in range(4):
        write_file(Path(f"data/p/{i}.jpg"), picture)
    write_file(Path("data/a.jsonl"), lines(records))
    shown = invoke("init", "data").output
    line = "field 'image_path' holds media that no sample uses; name it in source.fields"
    assert f"warning: {line}" in shown
    for task in ("vqa", "bmr"):
        overrides = ("engine.workers=0", f"source.task={task}", f"output.path={task}")
        status, _, said = command("run", "pack.yaml", *overrides)
        assert status == 1
        assert f"none of the 4 samples of 'data' has an image or a video under task {task}" in said
        assert "source.fields, such as {images: FIELD}" in said
        assert (
            "warning                 field 'image_path' holds media"
            in Path(task, "_packing/plan/summary.txt").read_text()
        )
    named = invoke("run", "pack.yaml", "engine.workers=0", "source.fields={images: image_path}")
    assert "tokens with loss        " in named.output
    assert "4 images, 0 videos in 4 of 4 packed samples; " in named.output
    invoke("run", "pack.yaml", *overrides, "source.text_only=true")


def test_the_file_that_is_written_runs_and_is_never_overwritten(tmp_path: Path) -> None:
    data = captioning_pairs(tmp_path / "data", 6)
    to = tmp_path / "pack.yaml"
    invoke("init", data, "--to", to, "--output", tmp_path / "out")
    config = load_config(to, ["engine.workers=0"])
    assert (config.source[0].format, config.task) == ("pairs", "captioning")
    run = make_run(config.source[0].model_dump(), tmp_path / "packed")
    assert measure(run).info.num_samples == 6
    to.write_text("mine")
    result = CliRunner().invoke(cli, ["init", str(data), "--to", str(to)])
    assert result.exit_code != 0
    assert to.read_text() == "mine"
    invoke("init", data, "--to", to, "--force")
    assert "format: pairs" in to.read_text()


@pytest.mark.parametrize(
    ("model_type", "family"), [("qwen3_5", "qwen3_5"), ("qwen3_5_moe", "qwen3_5"), ("llava", "")]
)
def test_the_checkpoint_names_its_family(model_type: str, family: str, tmp_path: Path) -> None:
    """Qwen3.6 and 3.8 are Qwen3_5ForConditionalGeneration, too."""
    save_tokenizer(family or "llava_1_5", tmp_path / "model")
    write_file(tmp_path / "model" / "config.json", json.dumps({"model_type": model_type}).encode())
    data, to = captioning_pairs(tmp_path / "data", 3), tmp_path / "pack.yaml"
    invoke("init", data, "--to", to, "--processor", tmp_path / "model")
    model = load_config(to).model
    assert (model.family, model.processor) == (family or "llava_1_5", str(tmp_path / "model"))
    assert ("min_pixels: 65536" in to.read_text()) == bool(family)


def by_absolute_paths(root: Path, count: int) -> None:
    """ms-swift's lines, whose pictures lie in two folders elsewhere."""
    rows = []
    for i in range(count):
        name = root / "coco" / ("train", "val")[i % 2] / f"{i % 5}.jpg"
        write_file(name, SAMPLES[0][2][0])
        said = dialogue("<image>What is it?", f"It is {i}.")
        rows.append({"messages": said, "images": [str(name)]})
    write_file(root / "data" / "a.jsonl", lines(rows))


@pytest.mark.parametrize("form", ["ms-swift", "LLaMA-Factory"])
def test_files_with_absolute_paths_run_as_they_are(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """init, run, from the folder of the data."""
    by_absolute_paths(tmp_path, 60)
    data = tmp_path / "data"
    if form == "LLaMA-Factory":
        tags = {"role_tag": "role", "content_tag": "content"}
        tags |= {"user_tag": "user", "assistant_tag": "assistant"}
        columns = {"messages": "messages", "images": "images"}
        entry = {"file_name": "a.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags}
        write_file(data / "dataset_info.json", json.dumps({"own": entry}).encode())
    monkeypatch.chdir(data)
    shown = invoke("init", ".").output
    assert f"image_root: {tmp_path / 'coco'}  #" in Path("pack.yaml").read_text()
    assert "split" not in Path("pack.yaml").read_text().replace("# no val split", "")
    assert "REFUSED" not in shown
    assert "measured 10 of the first records; next: offline-packing run --deep pack.yaml" in shown
    said = invoke("run", "--deep", "pack.yaml", "engine.workers=0").output
    assert "samples                 60\nset aside               0\n" in said
    assert (tmp_path / "data_packed" / "manifest.json").is_file()


def test_what_cannot_run_is_not_next(tmp_path: Path) -> None:
    """And no output inside the source, and no val split of few samples."""
    rows = [{"caption": "A.", "image": f"/nowhere/{i}.jpg"} for i in range(1200)]
    write_file(tmp_path / "data" / "a.jsonl", lines(rows))
    to = tmp_path / "pack.yaml"
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "data"), "--to", str(to)])
    assert result.exit_code == 1
    assert "would be set aside: 10 of 10 records, path_outside_root: '/nowhere/0.jpg'" in (
        result.output
    )
    assert "next:" not in result.output
    assert f"none of the first records can be packed so; correct {to}" in result.output
    assert "split: {train: 0.99, val: 0.01}" in to.read_text()
    inside = ["init", str(tmp_path / "data"), "--to", str(tmp_path / "b.yaml"), "--output"]
    result = CliRunner().invoke(cli, [*inside, str(tmp_path / "data" / "out")])
    assert "lies inside source.path" in str(result.exception)
    assert not (tmp_path / "b.yaml").exists()


def test_a_picture_without_a_name_is_no_path(tmp_path: Path) -> None:
    write_file(tmp_path / "data" / "a.jsonl", lines([{"caption": "A.", "images": [""]}]))
    found = recognise(str(tmp_path / "data"))
    assert "image_root" not in found.options
    assert len(found.examples[0].missing) == 1


def test_a_folder_of_img2dataset_is_tars(tmp_path: Path) -> None:
    """Beside each lie a table and a summary."""
    picture = SAMPLES[0][2][0]
    for shard in ("00000", "00001"):
        members = [(f"{shard}0001.jpg", picture), (f"{shard}0001.txt", b"A red square.")]
        record = json.dumps({"caption": "A red square.", "status": "success"}).encode()
        write_file(tmp_path / f"{shard}.tar", tar_bytes([*members, (f"{shard}0001.json", record)]))
        pq.write_table(pa.table({"caption": ["A red square."]}), tmp_path / f"{shard}.parquet")
        write_file(tmp_path / f"{shard}_stats.json", b'{"count": 1}')
    found = recognise(str(tmp_path))
    assert (found.options["format"], found.options["task"], found.others) == (
        "webdataset",
        "captioning",
        (),
    )


@pytest.mark.parametrize(("splits", "split"), [(("train", "test"), "train"), (("test",), "test")])
def test_the_split_that_has_tars_is_read(
    splits: tuple[str, ...], split: str, tmp_path: Path
) -> None:
    formats.energon(tmp_path, SAMPLES)
    parts = {name: ["shard-000.tar"] if name in splits else [] for name in ("train", "val", "test")}
    (tmp_path / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump({"split_parts": parts}))
    assert recognise(str(tmp_path)).options["split"] == split


@pytest.mark.parametrize(
    ("file", "content", "limits"),
    [
        ("preprocessor_config.json", {"min_pixels": 784, "max_pixels": 50_176}, (784, 50_176)),
        ("preprocessor_config.json", {"size": {"longest_edge": 99_840}}, (3136, 99_840)),
        (
            "processor_config.json",
            {"image_processor": {"size": {"shortest_edge": 784, "longest_edge": 99_840}}},
            (784, 99_840),
        ),
    ],
)
def test_the_checkpoint_says_how_many_pixels(
    file: str, content: dict[str, Any], limits: tuple[int, int], tmp_path: Path
) -> None:
    save_tokenizer("qwen2_vl", tmp_path / "model")
    write_json(tmp_path / "model" / "config.json", {"model_type": "qwen2_vl"})
    write_json(tmp_path / "model" / file, content)
    data, to = captioning_pairs(tmp_path / "data", 3), tmp_path / "pack.yaml"
    invoke("init", data, "--to", to, "--processor", tmp_path / "model")
    model: Any = load_config(to).model
    assert (model.min_pixels, model.max_pixels) == limits


def test_what_is_refused_and_named(tmp_path: Path) -> None:
    """Nothing is written: no data, folders of several forms, a checkpoint of no family, …"""
    write_file(tmp_path / "none" / "a.pdf", b"%PDF")
    write_file(tmp_path / "model" / "config.json", b'{"model_type": "bert"}')
    data = captioning_pairs(tmp_path / "several" / "a", 3)
    formats.webdataset(tmp_path / "several" / "b", SAMPLES)
    write_json(tmp_path / "meta.json", {"own": {"root": "coco/", "annotation": "own.jsonl"}})
    latin = tmp_path / os.fsdecode(b"caf\xe9")
    captioning_pairs(latin, 3)
    cases: list[tuple[list[Any], str]] = [
        ([tmp_path / "none"], "is of no known format; the formats are pairs, captions"),
        ([tmp_path / "several"], "several forms: a is pairs, b is webdataset; call init with each"),
        (
            [tmp_path / "meta.json"],
            "InternVL's list of datasets: own (annotation own.jsonl, root co",
        ),
        ([latin], "is not UTF-8"),
        (["s3://bucket/data"], "'s3://bucket/data' is remote"),
        ([tmp_path / "no"], f"'{tmp_path}/no' does not exist"),
        ([data, "--processor", tmp_path / "model"], "is a 'bert'; the families are qwen2_vl"),
        ([data, "--processor", data], "no config"),
    ]
    for arguments, why in cases:
        given = ["init", *map(os.fspath, arguments), "--to", f"{tmp_path}/a.yaml"]
        result = CliRunner().invoke(cli, given)
        assert result.exit_code != 0
        assert why in f"{result.exception} {result.output}", why
        assert not (tmp_path / "a.yaml").exists()
