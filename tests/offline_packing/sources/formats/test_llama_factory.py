"""LLaMA-Factory's entries: all fields honoured or refused by name; bad records set aside."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import StageError
from tests.helpers.accounting import open_one, outcomes, turns_in
from tests.helpers.datasets import make_run, pack_all
from tests.helpers.formats import write_file

SHAREGPT = {"file_name": "a.json", "formatting": "sharegpt"}
TALK = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def write_entry(root: Path, entry: Any, records: Any = ()) -> dict[str, Any]:
    write_file(root / "dataset_info.json", json.dumps({"a": entry}).encode())
    write_file(root / "a.json", json.dumps(list(records)).encode())
    return {"format": "llama_factory", "path": str(root), "dataset": "a"}


def turns_of(config: dict[str, Any], root: Path) -> list[tuple[str, str]]:
    """Turns of the only record."""
    (turns,) = turns_in(config, root).values()
    return turns


def test_bad_dialogues_are_set_aside(tmp_path: Path) -> None:
    asked, answer = TALK
    bad: list[Any] = ["Hi", None, [5, 6], [{"value": "x"}, answer]]
    bad += [[{"from": role, "value": "x"}, answer] for role in (["human"], {"a": 1})]
    bad += [[{"from": "human", "value": 5}, answer]]
    called = {"from": "function_call", "value": "f"}  # which is no JSON
    bad += [[asked, called, {"from": "observation", "value": "1"}, answer]]
    talks = [*bad, [asked, {"from": "assistant", "value": "x"}], TALK]
    config = write_entry(tmp_path / "data", SHAREGPT, [{"conversations": one} for one in talks])
    expected = ["bad_record"] * len(bad) + ["bad_roles", "ok"]
    assert list(outcomes(config, tmp_path).values()) == expected


def test_bad_alpaca_records_are_set_aside(tmp_path: Path) -> None:
    bad = [
        *({"history": history} for history in (5, "x", {"a": 1}, [5], [["x"]], [[1, 2]])),
        *({"instruction": 5}, {"instruction": ["x"]}, {"input": 5}, {"input": {"a": 1}}),
        *({"output": None}, {"output": [{}]}, {"system": 5}, {"images": 5}),
    ]
    good = {"instruction": "Say hi.", "output": "Hi."}
    config = write_entry(tmp_path, {"file_name": "a.json"}, [{**good, **one} for one in [*bad, {}]])
    assert [*outcomes(config, tmp_path).values()] == ["bad_record"] * len(bad) + ["ok"]


def test_tools_are_read_and_audio_is_set_aside(tmp_path: Path) -> None:
    entry = {**SHAREGPT, "columns": {"messages": "talk", "tools": "t", "audios": "sound"}}
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
    called = [TALK[0], call, {"from": "observation", "value": "1"}, TALK[1]]
    records = [
        {"talk": TALK, "t": "", "sound": []},
        {"talk": called, "t": '[{"name": "f"}]'},
        {"talk": TALK, "sound": ["a.wav"]},
    ]
    config = write_entry(tmp_path / "data", entry, records)
    # The default family's template writes no tools.
    found = ["ok", "not_in_template", "bad_record"]
    assert list(outcomes(config, tmp_path / "a").values()) == found
    model = {"family": "qwen3_vl", "min_pixels": 1024}
    run = make_run({**config, "task": "bmr"}, tmp_path / "out", model=model)
    assert pack_all(run).counts.packed == 2
    write_entry(tmp_path / "data", {**entry, "tags": {}}, records)
    with pytest.raises(StageError, match=r"source\.0\.description\.listing was .*tags"):
        pack_all(run)


ALPACA = {"prompt": "instruction", "response": "output"}
SAY = {"instruction": "Say", "input": "hi.", "output": "Hi.", "other": ""}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({}, ("Say\nhi.", "Hi.")),
        ({"columns": ALPACA}, ("Say", "Hi.")),
        ({"columns": {**ALPACA, "query": "input"}}, ("Say\nhi.", "Hi.")),
        ({"columns": {**ALPACA, "prompt": "other", "query": "input"}}, ("hi.", "Hi.")),
        ({"columns": {**ALPACA, "query": None}}, ("Say", "Hi.")),
        # fields that change nothing
        ({"tags": {"role_tag": "role"}}, ("Say\nhi.", "Hi.")),
        ({**SHAREGPT, "split": "train", "subset": "en", "num_samples": None}, ("Hi", "Hello")),
        ({**SHAREGPT, "folder": "x", "revision": "main", "tags": {}}, ("Hi", "Hello")),
        (
            {**SHAREGPT, "ranking": False, "columns": {"messages": "talk", "kto_tag": None}},
            ("Hi", "Hello"),
        ),
        ({**SHAREGPT, "tags": {"function_tag": "function_call"}}, ("Hi", "Hello")),
    ],
)
def test_columns_and_tags(tmp_path: Path, entry: Any, expected: tuple[str, str]) -> None:
    record = {**SAY, "conversations": TALK, "talk": TALK}
    config = write_entry(tmp_path, {"file_name": "a.json", **entry}, [record])
    assert turns_of(config, tmp_path) == [expected]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nope", "'a' .* is 'nope', not an object"),
        ([], r"is \[\], not an object"),
        ({**SHAREGPT, "columns": ["x"]}, "columns .*not an object of names"),
        ({**SHAREGPT, "columns": {"messages": ["x"]}}, "columns .*not an object of names"),
        ({**SHAREGPT, "columns": {"image": "images"}}, "columns.image, which is not known"),
        ({**SHAREGPT, "tags": {"role": "from"}}, "tags.role, which is not known"),
        ({**SHAREGPT, "tags": "x"}, "tags 'x', not an object"),
        ({**SHAREGPT, "columns": {"kto_tag": "label"}}, "holds preferences .*kto_tag"),
        ({**SHAREGPT, "ranking": True}, "holds preferences"),
        ({**SHAREGPT, "num_samples": 100}, "num_samples 100, .*source.repeat or source.weight"),
        ({**SHAREGPT, "split": "train[:10]"}, r"split 'train\[:10\]'; a file is all train"),
        ({**SHAREGPT, "ms_hub_url": "x/y"}, "is read from its ms_hub_url"),
        ({**SHAREGPT, "cloud_file_name": "s3://x"}, "is read from its cloud_file_name"),
        ({**SHAREGPT, "rank": True}, "field 'rank', which is not known"),
        ({**SHAREGPT, "formatting": ["x"]}, "formatting .*known: alpaca, sharegpt, openai"),
        ({**SHAREGPT, "file_name": 5}, "file_name 5; only files"),
    ],
)
def test_entries_that_are_refused_by_name(tmp_path: Path, entry: Any, message: str) -> None:
    config = write_entry(tmp_path, entry)
    with pytest.raises(StageError, match=message):
        open_one(config, tmp_path)
    for content in (b"[]", b'"a"', b"null", b"7"):
        write_file(tmp_path / "dataset_info.json", content)
        with pytest.raises(StageError, match=r"dataset_info\.json cannot be read: .*not an object"):
            open_one(config, tmp_path)


def test_ids_of_a_table(tmp_path: Path) -> None:
    config = write_entry(tmp_path, {**SHAREGPT, "file_name": "a.parquet"})
    table = pa.table({"id": ["x"], "conversations": pa.array([TALK])})
    pq.write_table(table, tmp_path / "a.parquet")
    assert outcomes(config, tmp_path) == {"x": "ok"}


def test_plain_text_is_packed(tmp_path: Path) -> None:
    """Lines of a .txt are read again when packs are written."""
    config = write_entry(tmp_path / "data", {"file_name": "a.txt", "columns": {"prompt": "text"}})
    write_file(tmp_path / "data" / "a.txt", b"One line.\nAnother one.\n")
    run = make_run({**config, "task": "captioning"}, tmp_path / "out")
    assert pack_all(run).counts.packed == 2
