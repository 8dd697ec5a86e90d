"""Packs with LoongForge's fields: they are ours as well, and nothing of a sample is lost."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from megatron.energon import WorkerConfig, get_loader

from offline_packing.verify.verify import verify
from task_encoders.packed_dataset import get_packed_train_dataset
from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers.datasets import dialogue, image_bytes, make_run, pack_all
from tests.helpers.tiny_families import encoder_options, save_tokenizer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SYSTEM = {"role": "system", "content": "Be brief."}


def records() -> list[dict[str, Any]]:
    """Dialogues on a picture or two; some with tools or a system message; some that do not fit."""
    found = []
    for i in range(12):
        messages = dialogue(f"<image>What is {i}?", "A number.", "Sure?", "Yes. " * (i + 1))
        record = {"messages": messages, "images": ["0.jpg"], "id": f"plain{i}"}
        if i % 3 == 0:
            record["messages"] = [SYSTEM, *messages]
        if i % 4 == 0:
            called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
            result = {"role": "tool", "content": "Rain."}
            answer = {"role": "assistant", "content": "Take a coat."}
            asked = {"role": "user", "content": "And the weather?"}
            record["messages"] = [*record["messages"], asked, called, result, answer]
            record["tools"] = [WEATHER]
        found.append(record)
    untrained = dialogue("<image>Who?", "Nobody.", "Who?", "Me.")
    untrained[1]["loss_weight"] = 0
    found.append({"messages": untrained, "images": ["0.jpg"], "id": "untrained"})
    found.append({"messages": dialogue("No picture?", "None."), "id": "text"})
    return found


def packed(root: Path) -> Any:
    """A run over them, packed, and its tokenizer's folder."""
    save_tokenizer("qwen3_vl", root / "tokenizer")
    (root / "source").mkdir()
    (root / "source/0.jpg").write_bytes(image_bytes(84, 56))
    lines = [json.dumps(record) for record in records()]
    (root / "source/data.jsonl").write_text("\n".join(lines))
    source = {"format": "jsonl", "path": str(root / "source/data.jsonl"), "task": "bmr"}
    model = {"family": "qwen3_vl", "processor": str(root / "tokenizer")}
    model |= encoder_options("qwen3_vl")
    output, pack = {"layout": "loongforge"}, {"seq_length": 1024}
    return make_run(source, root / "packed", model=model, pack=pack, output=output)


def test_packs_hold_its_fields_and_ours(tmp_path: Path) -> None:
    run = packed(tmp_path)
    counts = pack_all(run)["counts"]
    aside = pq.read_table(run.workspace.plan / "set_aside.parquet").to_pylist()
    details = {row["key"].partition("/")[2] or row["key"]: row["detail"] for row in aside}
    assert sorted(details.values()) == [
        "layout loongforge holds no answer without loss, nor system or developer message further "
        "on",
        "layout loongforge holds no sample without an image among others",
    ]
    assert counts["packed"] == 12
    assert verify(run, deep=True).ok
    found = []
    for shard in run.workspace.root.glob("*.tar"):
        found += records_of(shard)
    conversations = [one for record in found for one in record["messages"]]
    assert [len(record["messages"]) for record in found] == [
        len(record["media_files"]) for record in found
    ]
    assert {record["media_type"] for record in found} == {"image"}
    assert sum("tools" in one for one in conversations) == 3
    assert sum(one["messages"][0] == SYSTEM for one in conversations) == 4
    assert (
        sum(
            message.get("tool_calls") == [CALL]
            for one in conversations
            for message in one["messages"]
        )
        == 3
    )


def records_of(shard: Path) -> list[dict[str, Any]]:
    """The JSON of each pack in a tar."""
    with tarfile.open(shard) as tar:
        files = [tar.extractfile(member) for member in tar if member.name.endswith(".json")]
        return [json.load(file) for file in files if file is not None]


def test_our_task_encoder_reads_them(tmp_path: Path) -> None:
    run = packed(tmp_path)
    pack_all(run)
    encoder = Qwen2VLTaskEncoder(
        seq_length=1024,
        model=run.config.model,
        settings=PackingSettings(packed=True, bmr=True),
    )
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_packed_train_dataset(
        run.workspace.root, encoder, worker_config=config, repeat=False
    )
    keys = [key for batch in get_loader(dataset) for key in batch.sub_sample_keys]
    assert len(set(keys)) == len(keys) == 12
