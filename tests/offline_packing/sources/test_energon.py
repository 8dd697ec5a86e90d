"""Energon's prepared datasets: field maps, splits, and one that Energon itself prepared."""

import json
from pathlib import Path
from typing import Any

import pytest

from offline_packing.sources.energon import expand_range
from tests.offline_packing.datasets import image_bytes
from tests.offline_packing.sources.accounting import MeasuredSample, account, open_source
from tests.offline_packing.sources.formats import tar_bytes, write_file

JPEG = image_bytes()
SPLIT = "split_parts: {train: [a.tar], val: [b.tar]}\nexclude: []\n"


def prepared(root: Path, description: str, *members: tuple[str, bytes], split: str = SPLIT) -> Path:
    write_file(root / ".nv-meta" / "dataset.yaml", description.encode())
    write_file(root / ".nv-meta" / "split.yaml", split.encode())
    for name in ("a.tar", "b.tar"):
        write_file(root / name, tar_bytes(members))
    return root


def rows(root: Path, task: str, **options: Any) -> list[tuple[str, str, MeasuredSample | None]]:
    return account(
        open_source({"format": "energon", "path": str(root), "task": task, **options}, root)
    )


def turns(root: Path, task: str) -> tuple[str, str]:
    """Prompt and answer of the only sample, read from its locator."""
    source = open_source({"format": "energon", "path": str(root), "task": task}, root)
    ((key, outcome, row),) = account(source)
    assert (key, outcome) == ("a/k", "ok")
    assert row is not None
    (turn,) = source.read_sample(key, row.json, len(row.media)).turns
    return turn.prompt, turn.answer


def sample_type(name: str, **field_map: str) -> str:
    return (
        f"sample_type: {{__module__: megatron.energon, __class__: {name}}}\n"
        f"field_map: {json.dumps(field_map)}\n"
    )


@pytest.mark.parametrize(
    ("caption", "members"),
    [
        ("txt", [("k.txt", b"A square.")]),
        ("json[caption]", [("k.json", b'{"caption": "A square."}')]),
        ("json[captions][1][text]", [("k.json", b'{"captions": [7, {"text": "A square."}]}')]),
        ("caption.txt,txt", [("k.txt", b"A square.")]),
    ],
)
def test_captioning(tmp_path: Path, caption: str, members: list[tuple[str, bytes]]) -> None:
    description = sample_type("CaptioningSample", image="jpg", caption=caption)
    prepared(tmp_path, description, ("k.jpg", JPEG), ("k.thumbnail.png", b"x"), *members)
    assert turns(tmp_path, "captioning") == ("", "A square.")


def test_vqa_from_several_members(tmp_path: Path) -> None:
    description = sample_type(
        "VQASample", image="jpg", context="q.txt", answers="a.json[all]", answer_weights="w.json[w]"
    )
    prepared(
        tmp_path,
        description,
        *[("k.q.txt", b"Which?"), ("k.jpg", JPEG), ("k.a.json", b'{"all": ["This.", "That."]}')],
        ("k.w.json", b'{"w": [0.3, 0.7]}'),
    )
    assert turns(tmp_path, "vqa") == ("Which?", "That.")


def test_vqa_without_weights_takes_the_first(tmp_path: Path) -> None:
    description = sample_type(
        "VQASample", image="jpg", context="json[q]", answers="json[a]", answer_weights="json[w]"
    )
    prepared(tmp_path, description, ("k.jpg", JPEG), ("k.json", b'{"q": "Q", "a": ["x", "y"]}'))
    assert turns(tmp_path, "vqa") == ("Q", "x")


def test_missing_member(tmp_path: Path) -> None:
    description = sample_type("CaptioningSample", image="png", caption="txt")
    prepared(tmp_path, description, ("k.jpg", JPEG), ("k.txt", b"A."), ("l.png", JPEG))
    outcomes = {key: outcome for key, outcome, _ in rows(tmp_path, "captioning")}
    assert outcomes == {"a/k": "missing_image", "a/l": "bad_record"}


def test_splits_and_excluded_shards(tmp_path: Path) -> None:
    members = [("k.jpg", JPEG), ("k.txt", b"A.")]
    crude = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    prepared(tmp_path, crude, *members)
    assert [key for key, *_ in rows(tmp_path, "captioning", split="val")] == ["b/k"]
    both = "split_parts: {train: [a.tar, b.tar]}\nexclude: [a.tar]\n"
    prepared(tmp_path, crude, *members, split=both)
    assert [key for key, *_ in rows(tmp_path, "captioning")] == ["b/k"]


def test_expand_range() -> None:
    assert expand_range("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert expand_range("{0..1}/{2..3}") == ["0/2", "0/3", "1/2", "1/3"]
    assert expand_range("a.tar") == ["a.tar"]


def test_what_energon_prepared(tmp_path: Path) -> None:
    pytest.importorskip("megatron.energon")
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors import BaseWebdatasetFactory

    names = [f"shard-{i}.tar" for i in range(3)]
    for i, name in enumerate(names):
        members = [(f"k{i}.jpg", JPEG), (f"k{i}.json", b'{"caption": "A square."}')]
        write_file(tmp_path / name, tar_bytes(members))
    BaseWebdatasetFactory.prepare_dataset(
        EPath(tmp_path), names, split_parts_ratio=[("train", 1.0)], workers=1
    )
    description = sample_type("CaptioningSample", image="jpg", caption="json[caption]")
    write_file(tmp_path / ".nv-meta" / "dataset.yaml", description.encode())
    found = rows(tmp_path, "captioning")
    assert sorted(key for key, *_ in found) == [f"shard-{i}/k{i}" for i in range(3)]
    assert {outcome for _, outcome, _ in found} == {"ok"}
