"""A dataset that is lost does not look like success: examples, hints, and a limit that stops; and
warnings about the data as a whole, given before anybody trains on them."""

import csv
import io
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offline_packing
from offline_packing.measure.measure import measure
from offline_packing.runs import run as run_module
from offline_packing.runs.run import Run
from offline_packing.runs.warnings import run_warnings
from offline_packing.sources.reading.contents import describe_others, find_image_root
from offline_packing.sources.recognise import recognise
from offline_packing.storage.files import read_json
from task_encoders.families import model_options
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE
from tests.helpers.command import Command
from tests.helpers.datasets import (
    captioning_pairs,
    config_file,
    dialogue,
    image_bytes,
    make_config,
    make_run,
    plan_index,
    write_json,
)
from tests.helpers.formats import lines, of_lines, write_file
from tests.helpers.tiny_tokenizers import save_with_template, tiny_tokenizer


def config_of(folder: Path, *paths: Path, task: str = "captioning", form: str = "pairs") -> Path:
    """Write a configuration of sources whose output is `folder/out`."""
    sources = [{"format": form, "path": str(path), "task": task} for path in paths]
    config = make_config(sources, folder / "out")
    return config_file(folder / "pack.yaml", config)


def questions(path: Path, images: Path, prefix: str = "") -> Path:
    """Write 30 questions on one image each, and the images elsewhere."""
    records = [
        {"image": f"{prefix}{i}.jpg", "question": f"how many {i}", "answer": "two"}
        for i in range(30)
    ]
    write_file(path, lines(records))
    for i in range(30):
        write_file(images / f"{i}.jpg", image_bytes())
    return path


def test_pictures_that_are_elsewhere(tmp_path: Path, command: Command) -> None:
    """Every picture is somewhere else: the run stops, and says where they are."""
    path = questions(tmp_path / "data/vqa.jsonl", tmp_path / "data/pictures/train")
    config = config_of(tmp_path, path, task="vqa", form="jsonl")
    status, out, error = command("run", config)
    assert status == 1
    assert "'vqa:1' in " in error
    assert "'0.jpg': No such file" in error
    assert not list((tmp_path / "out").glob("*.tar"))
    pictures = tmp_path / "deep/pictures/train"
    path = questions(tmp_path / "deep/anno/vqa.jsonl", pictures, "train/")
    config = config_of(tmp_path, path, task="vqa", form="jsonl")
    shutil.rmtree(tmp_path / "out")
    status, out, error = command("run", config)
    root = f"{tmp_path}/deep/pictures"
    assert f"it is under {root!r}: set source.image_root={root}" in error
    assert f"  missing_image             30  'vqa:1' in {path}: " in out
    shutil.rmtree(tmp_path / "out")
    status, out, error = command("run", config, f"source.image_root={root}")
    assert status == 0
    assert "30 packed, 0 set aside" in out


def test_one_source_of_two_is_lost(tmp_path: Path, command: Command) -> None:
    """Though it is few of all samples."""
    captioning_pairs(tmp_path / "pairs", 60)
    write_json(tmp_path / "gone/a.json", {"caption": "a circle"})
    config = config_of(tmp_path, tmp_path / "pairs", tmp_path / "gone")
    status, out, error = command("run", config)
    assert status == 1
    assert f"source '{tmp_path}/gone' yields no sample, all are set aside: missing_image 1" in error
    assert "'gone/a' in" in error
    status, out, _ = command("run", config, "pack.max_set_aside=1", "--quiet")
    assert status == 0
    assert "60 packed + 1 set aside" in out


def test_too_many_of_a_source(tmp_path: Path, command: Command) -> None:
    """The list of them, the limit, how to go on, and that going on neither measures nor plans
    again; what measure and plan left out counts, what the configuration leaves out does not."""
    root = captioning_pairs(tmp_path / "data", 36)
    broken = [root / f"{name}.json" for name in ("broken", 'with "quotes", commas')]
    for path in broken:
        path.write_text("{")
    write_json(root / "long.json", {"caption": "red " * 900})
    (root / "long.jpg").write_bytes(image_bytes())
    config = config_of(tmp_path, root)
    status, _, error = command("set-aside", config)
    assert (status, "run measure first" in error) == (1, True)
    status, out, error = command("run", config)
    assert status == 1
    assert (
        "error: 3 of 39 samples (7.7%) are set aside, more than pack.max_set_aside=0.05: "
        "bad_json 2, overlong 1; for example 'broken' in " in error
    )
    assert "go on with pack.max_set_aside=0.077" in error
    assert "set aside by the plan, for example:\n  overlong                   1  'long' in " in out
    assert "raise pack.seq_length or lower model.max_pixels" in out
    assert "go on with pack.max_set_aside=0.077" in command("write", config)[2]
    listed = csv.DictReader(io.StringIO(command("set-aside", config, "--csv")[1]))
    assert [(row["key"], row["source"], row["reason"]) for row in listed] == [
        *((path.stem, str(root), "bad_json") for path in broken),
        ("long", str(root), "overlong"),
    ]
    out = command("set-aside", config, "--reason", "overlong")[1]
    assert [line.split("\t")[::2] for line in out.splitlines()] == [["long", "overlong"]]
    assert command("set-aside", config, "--reason", "nonsense")[0] == 2
    assert not list((tmp_path / "out").glob("*.tar"))
    plan = (tmp_path / "out/_packing/plan.json").stat().st_mtime_ns
    status, out, error = command("run", config, "pack.max_set_aside=0.077")
    assert status == 0
    assert (tmp_path / "out/_packing/plan.json").stat().st_mtime_ns == plan
    # What is complete stays so.
    assert command("run", config)[0] == 0
    shutil.rmtree(tmp_path / "out")
    for path in broken:
        path.unlink()
    status, out, error = command("run", config, "source.repeat=0.5")
    assert status == 0, error


def test_nothing_of_the_data_reaches_a_terminal_raw(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, names and fields with control characters: in warnings, lists and errors."""
    for name, value in {"handlers": [], "level": logging.WARNING}.items():
        monkeypatch.setattr(logging.root, name, value)  # the command sets its own
    evil = "\x1b[2J\x9b\u202e\u2067"
    records = [
        {"id": f"{evil}{i}", "question": "What?", "answer": f"It is {i}.", f"n{evil}": "Some text."}
        for i in range(9)
    ]
    lost = {"id": evil, "image": f"{evil}.jpg", "question": "What?", "answer": "That."}
    path = tmp_path / "a.jsonl"
    write_file(path, lines([*records, lost]))
    config = config_of(tmp_path, path, task="vqa", form="jsonl")
    shown = ""
    for verb in ("measure", "plan", "write", "set-aside", "set-aside --csv"):
        _, out, error = command(*verb.split(), config, "source.text_only=true")
        shown += out + error
    assert "measure: warning: field " in shown
    assert shown.count("x1b[2J") > 4
    assert not {"\x1b", "\x9b", "\u202e", "\u2067"} & set(shown)


@pytest.mark.parametrize(
    ("source_format", "message"),
    [
        ("pairs", "holds no records of source.format=pairs; set source.path, or 2 *.tar here: "),
        ("jsonl", "holds no *.jsonl; set source.path, or 2 *.tar here: source.format=webdataset"),
        ("parquet", "holds no *.parquet; set source.path, or 2 *.tar here: "),
    ],
)
def test_another_format(tmp_path: Path, command: Command, source_format: str, message: str) -> None:
    for i in range(2):
        write_file(tmp_path / f"data/shards/{i}.tar", b"")
    config = config_of(tmp_path, tmp_path / "data", form=source_format)
    status, _, error = command("run", config)
    assert status == 1
    assert message in error


def test_a_folder_of_pictures_that_is_a_link(tmp_path: Path, command: Command) -> None:
    """init and the run name the link's target, with which the run succeeds."""
    path = questions(tmp_path / "data/vqa.jsonl", tmp_path / "far/away/train", "train/")
    (tmp_path / "data/train").symlink_to(tmp_path / "far/away/train")
    config = config_of(tmp_path, path, task="vqa", form="jsonl")
    root = f"source.image_root={tmp_path}/far/away"
    assert command("run", config)[2].count(f"; set {root};") == 1
    shutil.rmtree(tmp_path / "out")
    assert command("run", config, root)[0] == 0
    found = recognise(str(path))
    assert found.options["image_root"] == f"{tmp_path}/far/away"
    (tmp_path / "far/away/train").rename(tmp_path / "far/away/other")
    (tmp_path / "data/train").unlink()
    (tmp_path / "data/train").symlink_to(tmp_path / "far/away/other")
    found = recognise(str(path))
    assert "REFUSED: 'train/0.jpg' is behind a link to" in found.examples[0].missing["train/0.jpg"]
    shutil.rmtree(tmp_path / "out")
    assert "rename what the link leads to" in command("run", config)[2]


def test_remedies_are_named_once(tmp_path: Path, command: Command) -> None:
    """And those of media that are not read are not those of damaged ones."""
    path = tmp_path / "data/a.jsonl"
    write_file(tmp_path / "data/a.heic", b"\0\0\0\x18ftypheic" + bytes(99))
    write_file(tmp_path / "data/a.svg", b'<?xml version="1.0"?>\n<svg width="9"/>')
    write_file(tmp_path / "data/a.jpg", image_bytes()[:-99])
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"image": "../a.jpg"},
            f"'../a.jpg' leads outside '{path.parent}'; set source.image_root to a folder above "
            "the images",
        ),
        ({"image": "a.heic"}, "'a.heic': HEIC is not read; convert it, for example to PNG"),
        ({"image": "a.svg"}, "'a.svg': SVG is not read; convert it, for example to PNG"),
        ({"image": "a.jpg"}, " bytes not processed); repair or remove it in the source"),
        (
            {"tools": [{"name": "f"}]},
            "the chat template writes no tools; those of qwen3_vl, qwen3_5, glm4v, glm46v, "
            "mistral3 do: set model.family and model.processor",
        ),
    ]
    for fields, expected in cases:
        write_file(path, lines([{"question": "What?", "answer": "It.", **fields}]))
        config = config_of(tmp_path, path, task="vqa", form="jsonl")
        error = command("run", config, "output.overwrite=true")[2]
        assert expected in error
        assert error.count("source.image_root") == (fields.get("image") == "../a.jpg")


def test_hints_look_near_only(tmp_path: Path) -> None:
    write_file(tmp_path / "in/a/pictures/0.jpg", image_bytes())
    (tmp_path / "in/b").mkdir()
    assert find_image_root(str(tmp_path / "in/b"), "pictures/0.jpg") == str(tmp_path / "in/a")
    assert find_image_root(str(tmp_path / "in/b"), "x/pictures/0.jpg") is None
    assert find_image_root(str(tmp_path / "in/b"), "1.jpg") is None
    assert find_image_root("s3://bucket/b", "0.jpg") is None
    assert describe_others("s3://bucket/b", "*.json") == ""
    assert describe_others(str(tmp_path / "in/a"), "*.json") == ""
    (tmp_path / "loop").symlink_to("loop")
    for name in ("a" * 300 + ".jpg", "loop/1", "\0.jpg"):
        assert find_image_root(str(tmp_path), name) is None
    assert describe_others(str(tmp_path), "*.jsonl") == ""


def run_of(folder: Path, records: list[dict[str, Any]], task: str = "vqa", **output: Any) -> Run:
    """A run over records that name 0.jpg to 9.jpg."""
    for i in range(10):
        write_file(folder / f"{i}.jpg", image_bytes(56, 56 + i))
    source = of_lines(folder / "a.jsonl", records, task)
    return make_run(source, folder / "out", output=output, pack={"seq_length": 64})


def asked(i: int, image: int, answer: str = "") -> dict[str, Any]:
    return {"image": f"{image}.jpg", "question": "What?", "answer": answer or f"This is {i}."}


def warned(run: Run) -> list[str]:
    """Return the warnings of a plan's summary."""
    found = [*run_warnings(run.config, measure(run), plan_index(run).packs)]
    summary = (run.workspace.plan / "summary.txt").read_text()
    assert all(f"\n  {line}\n" in summary for line in found)
    return found


def test_conversations_as_vqa(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = {"image": "0.jpg", "messages": dialogue("<image>a", "b", "c", "d")}
    records = [asked(0, 1), {**record, "id": 1}, {**record, "id": 2, "system": "Be brief."}]
    run = run_of(tmp_path / "vqa", records)
    (line,) = warned(run)
    assert line.startswith("2 of 3 samples have several turns under task vqa")
    assert offline_packing.pack(run.config).warnings == (line,)
    figures = read_json(run.workspace.report / "report.json")["figures"]
    assert [row["warning"] for row in figures["warnings"]["rows"]] == [line]
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        f"pack: warning: {line}"
    ]
    assert warned(run_of(tmp_path / "bmr", records, "bmr")) == []


NAME_ONE = "training reads train: name one of them so, unless the output is for validation alone"


@pytest.mark.parametrize(
    ("split", "line"),
    [
        (
            {"train": 0.25, "val": 0.75},
            "output.split gives val 75.0% of the samples and train 25.0%; training reads train",
        ),
        ({"trian": 0.5, "val": 0.5}, f"output.split has no train (trian, val); {NAME_ONE}"),
        ({"val": 0.5, "train": 0.5}, ""),
        ({"test": 1.0}, f"output.split has no train (test); {NAME_ONE}"),
    ],
)
def test_splits_that_leave_little_to_train(
    split: dict[str, float], line: str, tmp_path: Path
) -> None:
    found = warned(run_of(tmp_path, [asked(i, i) for i in range(10)], split=split))
    assert [one for one in found if "output.split" in one] == ([line] if line else [])


def test_copies_in_a_second_source(tmp_path: Path) -> None:
    """A folder copied as it is; of the third source, two samples have other texts."""
    run = run_of(tmp_path / "one", [asked(i, i) for i in range(10)])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    run_of(tmp_path / "three", [asked(i if i < 8 else -i, i) for i in range(10)])
    (first,) = run.config.source
    sources = [
        first.model_copy(update={"path": str(tmp_path / name), "name": name})
        for name in ("one", "two", "three")
    ]
    several = replace(run, config=run.config.model_copy(update={"source": tuple(sources)}))
    found = [line for line in warned(several) if line.startswith("source ")]
    assert found == [
        "source two: 10 of 10 samples are also in source one",
        "source three: 8 of 10 samples are also in source one",
    ]


@pytest.mark.parametrize(("positions", "is_told"), [(60, True), (64, False)])
def test_packs_longer_than_the_positions_of_a_checkpoint(
    positions: int, is_told: bool, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    save_with_template(tiny_tokenizer(), QWEN2_VL_TEMPLATE, checkpoint)
    text = {"max_position_embeddings": positions}
    write_json(checkpoint / "config.json", {"model_type": "qwen2_vl", "text_config": text})
    run = run_of(tmp_path / "data", [asked(i, i, "Yes. " * i) for i in range(10)])
    model = model_options(processor=str(checkpoint))
    found = warned(replace(run, config=run.config.model_copy(update={"model": model})))
    lines = [line for line in found if "max_position_embeddings" in line]
    assert len(lines) == is_told
    if is_told:
        assert lines[0].startswith(
            f"pack.seq_length 64 > max_position_embeddings 60 of {checkpoint}; "
        )
        assert re.search(r"; [1-9] of 10 samples are longer than that", lines[0])


def test_without_a_terminal_there_are_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_SECONDS_BETWEEN_LINES", 0)
    run = replace(make_run(tmp_path / "data", tmp_path / "out"), progress=True)
    with run.bar("measure", 600_000, "record") as bar:
        for _ in range(3):
            bar.update(100_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    for line in lines:
        assert re.fullmatch(
            r"measure: [\d,]+ of 600,000 records, \d+%, (\d\d:\d\d|\?) left", line
        ), line
    assert lines[-1].startswith("measure: 300,000 of 600,000 records, 50%, ")
