"""Samples, media and answers that are the same: counted over all parts of an index."""

from pathlib import Path
from typing import Any

import pytest

from offline_packing.measure import diagnosis
from offline_packing.measure.measure import measure
from offline_packing.runs.run import Run
from tests.helpers.datasets import (
    image_bytes,
    make_run,
)
from tests.helpers.formats import lines, write_file


def record(key: str, image: str = "0.jpg", text: str = "What?", **more: Any) -> dict[str, Any]:
    return {"id": key, "image": image, "question": text, "answer": "A cat.", **more}


def run_of(folder: Path, records: list[dict[str, Any]]) -> Run:
    write_file(folder / "0.jpg", image_bytes(56, 56))
    write_file(folder / "a.jsonl", lines(records))
    source = {"format": "jsonl", "path": str(folder / "a.jsonl"), "task": "bmr"}
    return make_run(source, folder / "out")


def test_what_is_said_of_data_in_common(tmp_path: Path) -> None:
    """Counts over all parts of an index."""
    records = [
        record(f"{i}", "0.jpg" if i % 5 == 0 else f"p{i}.jpg", f"{i}?", answer=f"It is {i}.")
        for i in range(1000)
    ]
    for i in range(3, 1000, 5):
        records[i]["answer"] = "None"
    records[7] = {**records[3], "id": "again"}
    run = run_of(tmp_path, records)
    for i in range(1000):
        write_file(tmp_path / f"p{i}.jpg", image_bytes(56, 56) + f"{i}".encode())
    assert measure(run).info.warnings == [
        "1 of 1,000 samples repeat an earlier one, such as 'again'",
        "200 of 1,000 samples show 1 image or video, such as '0'",
        "about 201 of 1,000 answers are 'None'",
    ]
    run.workspace.index_info.unlink()
    assert len(measure(run).info.warnings) == 3


def test_frequent_answers_of_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There are more different ones than are counted at a time."""
    monkeypatch.setattr(diagnosis, "_COUNTED", 8)
    monkeypatch.setattr(diagnosis, "_KEPT", 2)
    records = [
        record(f"{i}", answer="None" if i % 3 else f"It is {i}.", text=f"{i}?") for i in range(90)
    ]
    run = run_of(tmp_path, records)
    assert measure(run).info.common["answers"] == (60, "'None'")
