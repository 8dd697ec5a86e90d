"""Energon's prepared datasets: field maps, splits, and one that Energon itself prepared."""

import json
from pathlib import Path
from typing import Any

import pytest

from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from tests.helpers.accounting import PlannedSample, account, open_one, turns_in
from tests.helpers.datasets import image_bytes, make_run
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


ASKED = [{"type": "image"}, {"type": "text", "text": "Which?"}]
ROLES = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "This."}]
TALK = [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": "This."}]
#: Sample type and task by a field of its own.
TYPES = {
    "caption": ("CaptioningSample", "captioning"),
    "context": ("VQASample", "vqa"),
    "conversation": ("ChatMLWebdataset", "bmr"),
}
JSON = b'{"q": "Q", "a": ["x", "y"], "b": [7, {"text": "z"}]}'


@pytest.mark.parametrize(
    ("fields", "members", "expected"),
    [
        ({"caption": "txt"}, {"k.txt": b"\xef\xbb\xbfx"}, ("", "x")),
        ({"caption": "caption.txt,txt"}, {"k.txt": b"x"}, ("", "x")),
        ({"caption": "json[q]"}, {"k.json": JSON}, ("", "Q")),
        ({"caption": "json[b][1][text]"}, {"k.json": JSON}, ("", "z")),
        (  # the answer of most weight, without weights the first
            {"context": "q.txt", "answers": "a.json[a]", "answer_weights": "w.json[w]"},
            {"k.q.txt": b"Which?", "k.a.json": JSON, "k.w.json": b'{"w": [0.3, 0.7]}'},
            ("Which?", "y"),
        ),
        (  # a text of any ending, read again from a span with other members in it
            {"context": "q.txt", "answers": "a.cls"},
            {"k.q.txt": b"Which?", "k.png": JPEG, "k.x.npy": b"\0", "k.a.cls": b"y"},
            ("Which?", "y"),
        ),
        (
            {"context": "json[q]", "answers": "json[a]", "answer_weights": "json[w]"},
            {"k.json": JSON},
            ("Q", "x"),
        ),
        *(  # as Megatron-Bridge has them
            (
                {"imgs": "jpg", "conversation": "conversation.json"},
                {"k.conversation.json": json.dumps(said).encode()},
                ("<image>Which?", "This."),
            )
            for said in (
                *(ROLES, TALK, {"messages": ROLES}),
                *({"conversations": TALK}, {"conversation": TALK}),
            )
        ),
    ],
)
def test_field_maps(
    tmp_path: Path, fields: dict[str, str], members: dict[str, bytes], expected: tuple[str, str]
) -> None:
    kind, task = next(TYPES[name] for name in fields if name in TYPES)
    description = sample_type(kind, **{"image": "jpg", **fields})
    thumbnail = ("k.thumbnail.png", b"x")
    prepared(tmp_path, description, ("k.jpg", JPEG), thumbnail, *members.items())
    assert turns(tmp_path, task) == expected


def test_missing_member(tmp_path: Path) -> None:
    description = sample_type("CaptioningSample", image="png", caption="txt")
    prepared(tmp_path, description, ("k.jpg", JPEG), ("k.txt", b"A."), ("l.png", JPEG))
    outcomes = {key: outcome for key, outcome, _ in rows(tmp_path, "captioning")}
    assert outcomes == {"a/k": "missing_image", "a/l": "bad_record"}


MEMBERS = {"jpg": JPEG, "txt": b"A square."}
CAPTIONING = sample_type("CaptioningSample", image="jpg", caption="txt")


#: Names of shards, what is excluded, and the number of samples left.
SPLITS = [
    ('"s{00..02}.tar"', "", 12),
    ('"s{00..02}.tar"', '"s00.tar/0001", "s02.tar"', 7),
    ('"s{00..02}.tar"', '"s{00..01}.tar"', 4),
    ('"s{00..02}.tar"', '"s01.tar/000{4..6}", "s{00,02}.tar/0003"', 8),
    ('"s{00..02}.tar"', '"s0{0..2..2}.tar"', 4),
    ('"s{00..02}.tar"', '"s00/0001", "0001", "s07.tar"', 12),
    ('"s{02..00}.tar"', "", 12),
    ('"s{00,02}.tar"', "", 8),
    ("s01.tar, s00.tar", "", 8),
]


def test_samples_are_those_that_energon_reads(tmp_path: Path) -> None:
    """Of three shards of four captions each, prepared by Energon itself; split.yaml by hand."""
    energon = pytest.importorskip("megatron.energon")
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors import BaseWebdatasetFactory
    from megatron.energon.task_encoder.base import DefaultTaskEncoder

    names = [f"s{shard:02d}.tar" for shard in range(3)]
    for shard, name in enumerate(names):
        stems = [f"{i:04d}" for i in range(4 * shard, 4 * shard + 4)]
        members = [(f"{s}.{end}", data) for s in stems for end, data in MEMBERS.items()]
        write_file(tmp_path / name, tar_bytes(members))
    everything: dict[str, Any] = {"split_parts_ratio": [("train", 1.0)], "workers": 1}
    BaseWebdatasetFactory.prepare_dataset(EPath(tmp_path), names, **everything)
    write_file(tmp_path / ".nv-meta" / "dataset.yaml", CAPTIONING.encode())
    for shards, exclude, count in SPLITS:
        split = f"split_parts: {{train: [{shards}]}}\nexclude: [{exclude}]\n"
        write_file(tmp_path / ".nv-meta" / "split.yaml", split.encode())
        dataset = energon.get_val_dataset(
            tmp_path,
            split_part="train",
            worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=None,
            task_encoder=DefaultTaskEncoder(),
        )
        theirs = [
            f"{source.shard_name.removesuffix('.tar')}/{sample.__key__}"
            for sample in energon.get_loader(dataset)
            for source in sample.__sources__
        ]
        assert [key for key, *_ in rows(tmp_path, "captioning")] == theirs, (shards, exclude)
        assert len(theirs) == count


def test_another_exclude_is_another_listing_and_another_map_refused(tmp_path: Path) -> None:
    members, root = [("k.jpg", JPEG), ("k.txt", b"A."), ("k.cls", b"B.")], tmp_path / "data"
    config = {"format": "energon", "path": str(root), "task": "captioning"}
    scans = []
    for exclude in ("", "a.tar/l", "a.tar/k"):
        split = f"split_parts: {{train: [a.tar, b.tar]}}\nexclude: [{exclude}]\n"
        prepared(root, CAPTIONING, *members, split=split)
        scans.append(open_one(config, tmp_path).scan(4).fingerprint)
    assert len(set(scans)) == 3
    measure(run := make_run(config, tmp_path / "out"))
    prepared(root, sample_type("CaptioningSample", caption="cls"), *members, split=split)
    with pytest.raises(StageError, match=r"description\.listing was .*txt.*, is .*cls"):
        measure(run)


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
        for one in ("[a.tar]", "7", "{val: [b.tar]}", "{2: [b.tar]}", "{train: []}")
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
    assert [key for key, *_ in rows(root, "captioning", split="val")] == ["b/a"]
    assert not caplog.text
    with pytest.raises(StageError, match=r"a split 'test'; .* one of: train, val$"):
        rows(root, "captioning", split="test")
