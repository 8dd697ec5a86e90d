"""Warnings about the data as a whole, given before anybody trains on them; and the progress of a
stage where there is no terminal."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offline_packing
from offline_packing.report.report import report
from offline_packing.runs import run as run_module
from offline_packing.runs.run import Run
from offline_packing.storage.files import read_json
from task_encoders.families import model_options
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE
from tests.helpers.datasets import (
    dialogue,
    image_bytes,
    make_run,
    pack_all,
    plan_summary,
    write_json,
)
from tests.helpers.formats import lines, write_file
from tests.helpers.tiny_tokenizer import save_with_template, tiny_tokenizer


def run_of(folder: Path, records: list[dict[str, Any]], task: str = "vqa", **output: Any) -> Run:
    """A run over records that name 0.jpg to 9.jpg."""
    for i in range(10):
        write_file(folder / f"{i}.jpg", image_bytes(56, 56 + i))
    write_file(folder / "a.jsonl", lines(records))
    source = {"format": "jsonl", "path": str(folder / "a.jsonl"), "task": task}
    return make_run(source, folder / "out", output=output, pack={"seq_length": 64})


def asked(i: int, image: int, answer: str = "") -> dict[str, Any]:
    return {"image": f"{image}.jpg", "question": "What?", "answer": answer or f"This is {i}."}


def told(run: Run) -> list[str]:
    """The warnings of the summary, which are also the report's."""
    pack_all(run)
    summary = plan_summary(run)
    report(run)
    found: list[str] = read_json(run.workspace.report / "report.json")["warnings"]
    page = (run.workspace.report / "report.html").read_text()
    assert all(f"warning                 {line}\n" in summary for line in found)
    assert page.count("<li>") == len(found)
    return found


def test_conversations_as_vqa(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = {"image": "0.jpg", "messages": dialogue("<image>a", "b", "c", "d")}
    records = [asked(0, 1), {**record, "id": 1}, {**record, "id": 2, "system": "Be brief."}]
    run = run_of(tmp_path / "vqa", records)
    (line,) = told(run)
    assert line.startswith("2 of 3 samples have several turns under task vqa")
    assert offline_packing.pack(run.config).warnings == (line,)
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        f"pack: warning: {line}"
    ]
    assert told(run_of(tmp_path / "bmr", records, "bmr")) == []


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
    found = told(run_of(tmp_path, [asked(i, i) for i in range(10)], split=split))
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
    found = [line for line in told(several) if line.startswith("source ")]
    assert found == [
        "source two: 10 of 10 samples stand in source one, too",
        "source three: 8 of 10 samples stand in source one, too",
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
    found = told(replace(run, config=run.config.model_copy(update={"model": model})))
    lines = [line for line in found if "max_position_embeddings" in line]
    assert len(lines) == is_told
    if is_told:
        assert lines[0].startswith(
            f"pack.seq_length 64 > max_position_embeddings 60 of {checkpoint}; "
        )
        assert re.search(r"; [1-9] of 10 samples are longer than that", lines[0])


def make(tmp_path: Path, shown: bool = True) -> Run:
    return replace(make_run(tmp_path / "data", tmp_path / "out"), progress=shown)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute takes no time."""
    monkeypatch.setattr(run_module, "_SECONDS_BETWEEN_LINES", 0)


@pytest.mark.usefixtures("impatient")
def test_without_a_terminal_there_are_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with make(tmp_path).bar("measure", 600_000, "record") as bar:
        for _ in range(3):
            bar.update(100_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    for line in lines:
        assert re.fullmatch(
            r"measure: [\d,]+ of 600,000 records, \d+%, (\d\d:\d\d|\?) left", line
        ), line
    assert lines[-1].startswith("measure: 300,000 of 600,000 records, 50%, ")
