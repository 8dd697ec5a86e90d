"""Several samples of one id, as in LLaVA-Instruct: all are kept, only equal ones are duplicates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.index.table import key_hash
from offline_packing.measure import identity
from offline_packing.measure.identity import rename_repeated
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import make_plan
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from tests.helpers.datasets import dialogue, image_bytes, make_run, pack_all
from tests.helpers.formats import write_file
from tests.helpers.outputs import packs_of

NUM_KINDS = 3  # conversation, detail, complex


def llava_records(num_images: int = 4) -> list[dict[str, Any]]:
    """Three conversations on each image, one kind after another as in LLaVA-Instruct-150K."""
    return [
        {
            "id": f"{number:012d}",
            "image": f"{number:012d}.jpg",
            "conversations": [
                {"from": "human", "value": f"<image>\nQuestion {kind}"},
                {"from": "gpt", "value": "An answer."},
            ],
        }
        for kind in range(NUM_KINDS)
        for number in range(num_images)
    ]


def write_llava(root: Path, records: list[dict[str, Any]], name: str = "a.json") -> None:
    write_file(root / name, json.dumps(records).encode())
    for record in records:
        write_file(root / record["image"], image_bytes())


def llava_run(tmp_path: Path, out: str = "out", **engine: int) -> Run:
    source = {"format": "json", "path": str(tmp_path / "data"), "task": "vqa"}
    return make_run(source, tmp_path / out, engine=engine)


def keys_of(run: Run) -> list[str]:
    table = open_index(run).table("key", "key_hash", "source_id")
    keys: list[str] = table["key"].to_pylist()
    expected = [key_hash(0, key) for key in keys]
    assert table["key_hash"].to_pylist() == expected
    return keys


def index_bytes(run: Run) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(run.workspace.index.glob("part-*")))


def test_every_conversation_of_an_image_is_packed(tmp_path: Path) -> None:
    records = llava_records()
    write_llava(tmp_path / "data", [*records, records[5]])
    run = llava_run(tmp_path, samples_per_part=5)
    counts = pack_all(run).counts
    assert (counts.samples, counts.packed) == (13, 12)
    assert counts.set_aside == {"duplicate_key": 1}
    assert verify(run, deep=True).ok
    keys = keys_of(run)
    assert keys[:4] == [record["id"] for record in records[:4]]
    assert [key.partition("@")[0] for key in keys] == [r["id"] for r in [*records, records[5]]]
    assert len(set(keys)) == 12
    assert keys[12] == keys[5]
    packed = sorted(make_plan(run, open_index(run)).packs.sample_ids.tolist())
    assert packed == list(range(12))


def test_keys_do_not_depend_on_parts_workers_or_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llava(tmp_path / "data", llava_records())
    measure(run := llava_run(tmp_path, samples_per_part=5))
    for out, engine in {"one": {"samples_per_part": 4096}, "two": {"workers": 2}}.items():
        measure(other := llava_run(tmp_path, out, **engine))
        assert keys_of(other) == keys_of(run)

    replaced: list[Path] = []
    rename_part = identity._rename_part

    def killed(path: Path, *rest: Any) -> None:
        if replaced:
            raise KeyboardInterrupt
        replaced.append(path)
        rename_part(path, *rest)

    again = llava_run(tmp_path, "killed", samples_per_part=5)
    monkeypatch.setattr(identity, "_rename_part", killed)
    with pytest.raises(KeyboardInterrupt):
        measure(again)
    monkeypatch.undo()
    assert len(replaced) == 1
    assert not again.workspace.index_info.exists()
    measure(again)
    assert keys_of(again) == keys_of(run)
    assert index_bytes(again) == index_bytes(run)
    rename_repeated(open_index(again))
    assert index_bytes(again) == index_bytes(run)


def test_another_run_renamed_the_part_meanwhile(tmp_path: Path) -> None:
    write_llava(tmp_path / "data", llava_records())
    run = llava_run(tmp_path)
    measure(run)
    before = index_bytes(run)
    path = open_index(run).paths[0]
    seen = np.array([key_hash(0, r["id"]) for r in llava_records()], np.uint64)  # before the other
    identity._rename_part(path, np.ones(12, bool), np.where(np.arange(12) < 4, 0, seen))
    assert index_bytes(run) == before


def test_rows_of_one_id_with_images_inside(tmp_path: Path) -> None:
    """Equal texts on other pictures are other samples; equal rows are duplicates."""
    images = [image_bytes(56), image_bytes(84), image_bytes(56)]
    table = pa.table(
        {
            "id": pa.array([7, 7, 7]),
            "image": pa.array(images),
            "messages": pa.array([dialogue("<image>\nWhat?", "A square.")] * 3),
        }
    )
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "a.parquet")
    source = {"format": "parquet", "path": str(tmp_path / "data"), "task": "vqa"}
    run = make_run(source, tmp_path / "out")
    counts = pack_all(run).counts
    assert (counts.packed, counts.set_aside) == (2, {"duplicate_key": 1})
    assert verify(run, deep=True).ok


def test_copies_of_a_repeated_id(tmp_path: Path) -> None:
    write_llava(tmp_path / "data", llava_records())
    source = {"format": "json", "path": str(tmp_path / "data"), "task": "vqa", "repeat": 2}
    run = make_run(source, tmp_path / "out")
    counts = pack_all(run).counts
    assert (counts.packed, counts.set_aside) == (24, {})
    packed = {key for _, pack in packs_of(run) for key in pack}
    assert len(packed) == 24
    assert {key.partition("#")[0] for key in packed} == set(keys_of(run))
