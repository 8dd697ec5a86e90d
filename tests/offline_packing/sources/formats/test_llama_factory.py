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


BAD_DIALOGUES: dict[str, tuple[Any, str]] = {
    "role is a list": ([{"from": ["human"], "value": "x"}, TALK[1]], "bad_record"),
    "role is an object": ([{"from": {"a": 1}, "value": "x"}, TALK[1]], "bad_record"),
    "no role": ([{"value": "x"}, TALK[1]], "bad_record"),
    "content is a number": ([{"from": "human", "value": 5}, TALK[1]], "bad_record"),
    "a text": ("Hi", "bad_record"),
    "nothing": (None, "bad_record"),
    "message is a number": ([5, 6], "bad_record"),
    "a call is no JSON": (
        [
            TALK[0],
            {"from": "function_call", "value": "f"},
            {"from": "observation", "value": "1"},
            TALK[1],
        ],
        "bad_record",
    ),
    "unknown role": ([TALK[0], {"from": "assistant", "value": "x"}], "bad_roles"),
}


def test_bad_dialogues_are_set_aside(tmp_path: Path) -> None:
    records = [{"id": name, "conversations": talk} for name, (talk, _) in BAD_DIALOGUES.items()]
    config = write_entry(tmp_path / "data", SHAREGPT, [*records, {"id": 7, "conversations": TALK}])
    expected = {name: reason for name, (_, reason) in BAD_DIALOGUES.items()}
    assert outcomes(config, tmp_path) == {**expected, "7": "ok"}
    counts = pack_all(make_run({**config, "task": "bmr"}, tmp_path / "out")).counts
    assert counts.packed == 1


@pytest.mark.parametrize(
    "fields",
    [
        *({"history": history} for history in (5, "x", {"a": 1}, [5], [["x"]], [[1, 2]])),
        *({"instruction": 5}, {"instruction": ["x"]}, {"input": 5}, {"input": {"a": 1}}),
        *({"output": None}, {"output": [{}]}, {"system": 5}, {"images": 5}),
    ],
)
def test_bad_alpaca_records_are_set_aside(tmp_path: Path, fields: dict[str, Any]) -> None:
    good = {"instruction": "Say hi.", "output": "Hi."}
    config = write_entry(tmp_path, {"file_name": "a.json"}, [{**good, **fields}, good])
    assert outcomes(config, tmp_path) == {"a:1": "bad_record", "a:2": "ok"}


def test_tools_are_read_and_audio_is_set_aside(tmp_path: Path) -> None:
    entry = {**SHAREGPT, "columns": {"messages": "talk", "tools": "t", "audios": "sound"}}
    called = [
        TALK[0],
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
        {"from": "observation", "value": "1"},
        TALK[1],
    ]
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


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (None, "Say\nhi."),
        ({"prompt": "instruction", "response": "output"}, "Say"),
        ({"prompt": "instruction", "query": "input", "response": "output"}, "Say\nhi."),
        ({"prompt": "other", "query": "input", "response": "output"}, "hi."),
        ({"prompt": "instruction", "query": None, "response": "output"}, "Say"),
    ],
)
def test_instruction_and_input(tmp_path: Path, columns: Any, expected: str) -> None:
    entry = {"file_name": "a.json", "tags": {"role_tag": "role"}}  # tags mean nothing to alpaca
    entry |= {} if columns is None else {"columns": columns}
    record = {"instruction": "Say", "input": "hi.", "output": "Hi.", "other": ""}
    assert turns_of(write_entry(tmp_path, entry, [record]), tmp_path) == [(expected, "Hi.")]


@pytest.mark.parametrize(
    "fields",
    [
        {"split": "train", "subset": "en", "folder": "x", "revision": "main", "num_samples": None},
        {"ranking": False, "columns": {"messages": "conversations", "kto_tag": None}, "tags": {}},
        {"tags": {"observation_tag": "observation", "function_tag": "function_call"}},
    ],
)
def test_fields_that_change_nothing(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = write_entry(tmp_path, {**SHAREGPT, **fields}, [{"conversations": TALK}])
    assert turns_of(config, tmp_path) == [("Hi", "Hello")]


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
