"""Records with tools, calls, results and answers without loss: from a source to the rows that a
trainer reads, and repacked."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megatron.energon import get_loader

from offline_packing.demo.training import packed_train_dataset
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.families import build_sample_encoder
from task_encoders.packs.manifest import Counts
from task_encoders.packs.tokenized import IGNORE_INDEX
from tests.helpers.datasets import image_bytes, make_run, pack_all
from tests.helpers.formats import lines, write_file

MODEL: dict[str, Any] = {"family": "qwen3_vl", "min_pixels": 1024, "max_pixels": 65536}
TOOLS = [{"type": "function", "function": {"name": "zoom", "description": "Shows <|im_end|>."}}]
COUNT = 12


def record(i: int) -> dict[str, Any]:
    """Calls are JSON, as tables keep them."""
    call = {"name": "zoom", "arguments": {"at": [i, 2]}}
    messages = [
        {"from": "human", "value": f"<image>What is number {i}?"},
        {"from": "function_call", "value": json.dumps(call), "loss_weight": i % 2},
        {"from": "observation", "value": f"<image>{i} of {COUNT}"},
        {"from": "gpt", "value": f"<think>\nHm.\n</think>\n\nIt is {i}."},
    ]
    return {"messages": messages, "images": ["a.jpg", "b.jpg"], "tools": json.dumps(TOOLS)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same records as JSON lines and as a table."""
    root = tmp_path_factory.mktemp("tools")
    for name in ("a.jpg", "b.jpg"):
        write_file(root / name, image_bytes(64, 96))
    records = [record(i) for i in range(COUNT)]
    write_file(root / "chat.jsonl", lines(records))
    pq.write_table(pa.Table.from_pylist(records), root / "chat.parquet")
    return root


def packed(source: dict[str, Any], folder: Path) -> tuple[Run, Counts]:
    run = make_run({**source, "task": "bmr"}, folder, model=MODEL, pack={"seq_length": 1024})
    return run, pack_all(run).counts


def test_tools_from_records_to_rows(data: Path, tmp_path: Path) -> None:
    run, counts = packed({"format": "jsonl", "path": str(data / "chat.jsonl")}, tmp_path / "a")
    assert (counts.packed, counts.set_aside) == (COUNT, {})
    verified = verify(run, deep=True)
    assert (verified.problems, verified.num_samples) == ([], COUNT)

    table, of_table = packed(
        {"format": "parquet", "path": str(data / "chat.parquet")}, tmp_path / "b"
    )
    again, of_packs = packed({"format": "packs", "path": str(tmp_path / "a")}, tmp_path / "c")
    assert of_table.tokens == of_packs.tokens == counts.tokens
    for other in (table, again):
        assert verify(other, deep=True).num_tokens == verified.num_tokens

    tokenizer = build_sample_encoder(**MODEL).tokenizer
    dataset = packed_train_dataset(tmp_path / "a", "bmr", 1024, repeat=False, **MODEL)
    spelled = trained = ""
    for batch in get_loader(dataset):
        kept = batch.labels[batch.labels != IGNORE_INDEX].tolist()
        spelled += "".join(text for text, _ in tokenizer.spell(batch.tokens[0].tolist()))
        trained += "".join(text for text, _ in tokenizer.spell(kept))
    called = '<tool_call>\n{"name": "zoom", "arguments": {"at": ['
    assert spelled.count(called) == COUNT
    assert spelled.count('"description": "Shows <|im_end|>."') == COUNT
    assert spelled.count("<tool_response>\n<|vision_start|>") == COUNT
    assert trained.count(called) == COUNT // 2
    assert trained.count("<think>\nHm.\n</think>\n\nIt is ") == COUNT
    assert "tool_response" not in trained
