"""Energon's prepared datasets: field maps, splits, and one that Energon itself prepared."""

import json
from pathlib import Path
from typing import Any

import pytest

from offline_packing.errors import StageError
from tests.helpers.accounting import PlannedSample, account, open_one, turns_in
from tests.helpers.datasets import image_bytes
from tests.helpers.formats import tar_bytes, write_file

JPEG = image_bytes()
SPLIT = "split_parts: {train: [a.tar], val: [b.tar]}\nexclude: []\n"


def prepared(root: Path, description: str, *members: tuple[str, bytes], split: str = SPLIT) -> Path:
    write_file(root / ".nv-meta" / "dataset.yaml", description.encode())
    write_file(root / ".nv-meta" / "split.yaml", split.encode())
    for name in ("a.tar", "b.tar"):
        write_file(root / name, tar_bytes(members))
    return root


def rows(root: Path, task: str, **options: Any) -> list[tuple[str, str, PlannedSample | None]]:
    return account(
        open_one({"format": "energon", "path": str(root), "task": task, **options}, root)
    )


def turns(root: Path, task: str) -> tuple[str, str]:
    """Prompt and answer of the only sample, read from its locator."""
    (turn,) = turns_in({"format": "energon", "path": str(root), "task": task}, root)["a/k"]
    return turn


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


@pytest.mark.parametrize(
    ("field_map", "members", "expected"),
    [
        (
            {"context": "q.txt", "answers": "a.json[all]", "answer_weights": "w.json[w]"},
            [
                *[("k.q.txt", b"Which?"), ("k.a.json", b'{"all": ["This.", "That."]}')],
                ("k.w.json", b'{"w": [0.3, 0.7]}'),
            ],
            ("Which?", "That."),
        ),
        (  # without weights, the first
            {"context": "json[q]", "answers": "json[a]", "answer_weights": "json[w]"},
            [("k.json", b'{"q": "Q", "a": ["x", "y"]}')],
            ("Q", "x"),
        ),
    ],
)
def test_vqa(tmp_path: Path, field_map: Any, members: Any, expected: tuple[str, str]) -> None:
    description = sample_type("VQASample", image="jpg", **field_map)
    prepared(tmp_path, description, ("k.jpg", JPEG), *members)
    assert turns(tmp_path, "vqa") == expected


def test_missing_member(tmp_path: Path) -> None:
    description = sample_type("CaptioningSample", image="png", caption="txt")
    prepared(tmp_path, description, ("k.jpg", JPEG), ("k.txt", b"A."), ("l.png", JPEG))
    outcomes = {key: outcome for key, outcome, _ in rows(tmp_path, "captioning")}
    assert outcomes == {"a/k": "missing_image", "a/l": "bad_record"}


def test_another_split(tmp_path: Path) -> None:
    members = [("k.jpg", JPEG), ("k.txt", b"A.")]
    crude = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    prepared(tmp_path, crude, *members)
    assert [key for key, *_ in rows(tmp_path, "captioning", split="val")] == ["b/k"]


CAPTIONING = sample_type("CaptioningSample", image="jpg", caption="txt")


def energon_dataset(root: Path, exclude: str, shards: str = '"s{00..02}.tar"') -> Path:
    """Three shards of four captions each, prepared by Energon itself; split.yaml by hand."""
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors import BaseWebdatasetFactory

    names = [f"s{shard:02d}.tar" for shard in range(3)]
    for shard, name in enumerate(names):
        members = [
            member
            for i in range(4 * shard, 4 * shard + 4)
            for member in ((f"{i:04d}.jpg", JPEG), (f"{i:04d}.txt", b"A square."))
        ]
        write_file(root / name, tar_bytes(members))
    BaseWebdatasetFactory.prepare_dataset(
        EPath(root), names, split_parts_ratio=[("train", 1.0)], workers=1
    )
    write_file(root / ".nv-meta" / "dataset.yaml", CAPTIONING.encode())
    split = f"split_parts: {{train: [{shards}]}}\nexclude: [{exclude}]\n"
    write_file(root / ".nv-meta" / "split.yaml", split.encode())
    return root


def read_with_energon(root: Path) -> list[str]:
    """SHARD/KEY of what Energon's own loader gives of the train split, in order."""
    from megatron.energon import WorkerConfig, get_loader, get_val_dataset
    from megatron.energon.task_encoder.base import DefaultTaskEncoder

    dataset = get_val_dataset(
        root,
        split_part="train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None,
        task_encoder=DefaultTaskEncoder(),
    )
    return [
        f"{source.shard_name.removesuffix('.tar')}/{sample.__key__}"
        for sample in get_loader(dataset)
        for source in sample.__sources__
    ]


@pytest.mark.parametrize(
    ("exclude", "count"),
    [
        ("", 12),
        ('"s00.tar/0001", "s02.tar"', 7),
        ('"s{00..01}.tar"', 4),
        ('"s01.tar/000{4..6}", "s{00,02}.tar/0003"', 8),
        ('"s0{0..2..2}.tar"', 4),
        ('"s00/0001", "0001", "s07.tar"', 12),
    ],
)
def test_exclude_is_what_energon_excludes(tmp_path: Path, exclude: str, count: int) -> None:
    pytest.importorskip("megatron.energon")
    root = energon_dataset(tmp_path / "data", exclude)
    found = [key for key, *_ in rows(root, "captioning")]
    assert found == read_with_energon(root)
    assert len(found) == count


@pytest.mark.parametrize("shards", ['"s{02..00}.tar"', '"s{00,02}.tar"', "s01.tar, s00.tar"])
def test_shards_are_those_that_energon_reads(tmp_path: Path, shards: str) -> None:
    pytest.importorskip("megatron.energon")
    root = energon_dataset(tmp_path / "data", "", shards)
    found = [key for key, *_ in rows(root, "captioning")]
    assert found == read_with_energon(root)


def test_another_exclude_is_another_listing(tmp_path: Path) -> None:
    members = [("k.jpg", JPEG), ("k.txt", b"A.")]
    config = {"format": "energon", "path": str(tmp_path), "task": "captioning"}
    scans = []
    for exclude in ("", "a.tar/l", "a.tar/k"):
        split = f"split_parts: {{train: [a.tar, b.tar]}}\nexclude: [{exclude}]\n"
        prepared(tmp_path, CAPTIONING, *members, split=split)
        scans.append(open_one(config, tmp_path).scan(4).fingerprint)
    assert len(set(scans)) == 3


#: Patterns that expand to too many names, or too deep.
ENDLESS = (
    *("{a,b}" * 28, "a-{0..999999999}.tar", "a-" + "{a,b}" * 7 + "{0..9999}"),
    *("{a," * 2000 + "b" + "}" * 2000, "{a}" * 2000),
)
#: Contents of split.yaml, and what is said of them.
BAD_SPLITS = [
    *(
        (f"split_parts: {{train: [a.tar]}}\nexclude: {one}", "exclude: .*list tars, or TAR/KEY")
        for one in ("a.tar", "[7]", '["s{00..01.tar"]')
    ),
    *(
        (f"split_parts: {one}", r"has no tars in a split 'train'; set source\.split to")
        for one in ("[a.tar]", "7", "{val: [b.tar]}", "{train: []}")
    ),
    *((f'split_parts: {{train: ["{one}"]}}', "split_parts.train: ") for one in ENDLESS),
    ("split_parts: {train: [%s]}" % ("[" * 3000 + "]" * 3000), ""),
]


@pytest.mark.parametrize(("split", "message"), BAD_SPLITS, ids=range(len(BAD_SPLITS)))
def test_splits_that_are_refused(tmp_path: Path, split: str, message: str) -> None:
    prepared(tmp_path, CAPTIONING, split=f"{split}\n")
    with pytest.raises(StageError, match=rf"split\.yaml.*{message}"):
        rows(tmp_path, "captioning")


def test_what_the_default_split_leaves_out_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    member = ("a.json", json.dumps({"caption": "A."}).encode()), ("a.jpg", JPEG)
    root = prepared(tmp_path, "__class__: CrudeWebdataset\n", *member)
    rows(root, "captioning")
    assert "split 'train' is read, and not val (1 tars); set source.split" in caplog.text
    caplog.clear()
    rows(root, "captioning", split="train")
    assert not caplog.text
    with pytest.raises(StageError, match=r"a split 'test'; .* one of: train, val$"):
        rows(root, "captioning", split="test")


def test_a_metadataset_is_not_told_to_be_prepared(tmp_path: Path) -> None:
    path = tmp_path / "blend.yaml"
    path.write_text("__module__: megatron.energon\n__class__: MetadatasetV2\n")
    with pytest.raises(StageError, match="give each that a metadataset lists as a source"):
        open_one({"format": "energon", "path": str(path), "task": "bmr"}, tmp_path)


CHATML = (
    "__module__: megatron.bridge.data.energon.task_encoder_utils\n__class__: ChatMLWebdataset\n"
    "field_map: {imgs: %s, conversation: conversation.json}\nsubflavors: {}\n"
)
ASKED = [{"type": "image"}, {"type": "text", "text": "Which?"}]
ROLES = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "This."}]
TALK = [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": "This."}]


@pytest.mark.parametrize(
    "conversation",
    [ROLES, TALK, {"messages": ROLES}, {"conversations": TALK}, {"conversation": TALK}],
)
def test_dialogues_of_megatron_bridge(tmp_path: Path, conversation: Any) -> None:
    member = ("k.image.png", JPEG), ("k.conversation.json", json.dumps(conversation).encode())
    prepared(tmp_path, CHATML % "image.png", *member)
    assert turns(tmp_path, "bmr") == ("<image>Which?", "This.")


def test_pickles_of_megatron_bridge_are_refused(tmp_path: Path) -> None:
    prepared(tmp_path, CHATML % "jpgs", ("k.jpgs", b"\x80\x04."))
    with pytest.raises(StageError, match="field_map names 'jpgs', pickles or sound"):
        rows(tmp_path, "bmr")
