"""Packs as other packers write them: read, packed again and exported, nothing lost."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from offline_packing.export.export import export
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from tests.helpers.datasets import image_bytes, index_rows, make_run, pack_all
from tests.helpers.formats import tar_bytes
from tests.helpers.outputs import samples_of

Texts = tuple[tuple[tuple[str, str], ...], tuple[bytes, ...]]


class Pack(NamedTuple):
    """One pack of others: its task, record and members, and what its sub-samples are."""

    task: str
    record: Mapping[str, Any]
    members: Mapping[str, bytes]
    expected: list[Texts]


def picture(i: int) -> bytes:
    return image_bytes(28 * (2 + i % 9), 28 * (2 + i // 9))


def flat(task: str, padded: bool, names: Mapping[int, str] = {}, **record: Any) -> Pack:
    """Three or twelve sub-samples; `names` are those in the JSON where they are not members."""
    count = 3 if padded else 12
    members = {f"img{i:03d}.jpg" if padded else f"img{i}.jpg": picture(i) for i in range(count)}
    prompts = ["描述", "what about...", "", *(f"<image>\nq{i}" for i in range(3, count))]
    captions = [f"str{i}" for i in range(count)]
    expected: list[Texts] = [
        (((prompt, caption),), (image,))
        for prompt, caption, image in zip(prompts, captions, members.values(), strict=True)
    ]
    given = [names.get(i, name) for i, name in enumerate(members)]
    if record.get("prompts") == []:
        expected = [((("", turns[0][1]),), images) for turns, images in expected]
    elif padded:
        record["prompt"] = prompts
    else:
        record["prompts"] = prompts
    return Pack(task, {"images": given, "captions": captions, **record}, members, expected)


PATHS = {i: f"/data/part_00/{i:09d}.jpg" for i in range(12)}
PACKS = {
    "flat captions": flat("captioning", padded=True),
    "flat questions": flat("vqa", padded=True),
    "the key before each name": flat(
        "vqa", padded=True, names={i: f"ps_00000000.img{i:03d}.jpg" for i in range(3)}
    ),
    "prompts, img0": flat("vqa", padded=False),
    "prompts, img0, paths in the JSON": flat("vqa", padded=False, names=PATHS),
    "no prompts": flat("captioning", padded=False, names=PATHS, prompts=[]),
    "nested, with a gap": Pack(
        "bmr",
        {
            "images": [["img000.jpg"], [], ["img002.jpg"]],
            "prompt": [["描述这幅图"], ["what about this fig"], ["How are you?", "I am fine too."]],
            "captions": [["stri"], ["str2"], ["I am fine and you?", "Have a nice day"]],
        },
        {"img000.jpg": picture(0), "img002.jpg": picture(2)},
        [
            ((("描述这幅图", "stri"),), (picture(0),)),
            ((("what about this fig", "str2"),), ()),
            (
                (("How are you?", "I am fine and you?"), ("I am fine too.", "Have a nice day")),
                (picture(2),),
            ),
        ],
    ),
}


def write_pack(pack: Pack, root: Path, form: str) -> Path:
    record = json.dumps(pack.record, ensure_ascii=False, indent=4).encode()
    members = {f"ps_00000000.{name}": data for name, data in pack.members.items()}
    members["ps_00000000.json"] = record
    folder = root / ("raw_packing_data" if form == "files" else "wds")
    folder.mkdir(parents=True)
    if form == "files":
        for name, data in members.items():
            (folder / name).write_bytes(data)
        return folder
    (folder / "pretrain-000000.tar").write_bytes(tar_bytes(members.items()))
    return folder


def packed_in(run: Run) -> list[Texts]:
    """Texts and images of all sub-samples in the packs of a run."""
    return sorted(
        (tuple((turn.prompt, turn.answer) for turn in sample.turns), tuple(media))
        for _, sample, media in samples_of(run)
    )


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "tar") for name in PACKS),
        *((name, "files") for name in ("the key before each name", "nested, with a gap")),
    ],
)
def test_there_and_back(tmp_path: Path, name: str, form: str) -> None:
    pack = PACKS[name]
    source = {"format": "packs", "task": pack.task}
    path = write_pack(pack, tmp_path / "given", form)
    for number in range(2 if form == "tar" else 1):
        out, raw = tmp_path / f"out{number}", tmp_path / f"raw{number}"
        run = make_run(source | {"path": str(path)}, out)
        counts = pack_all(run).counts
        assert (counts.packed, counts.set_aside) == (len(pack.expected), {})
        assert verify(run, deep=True).ok
        assert packed_in(run) == sorted(pack.expected)
        export(out, raw)
        path = raw


def test_paths_of_loose_packs(tmp_path: Path) -> None:
    """JSON in one folder that names pictures by their paths in another."""
    pack = flat("vqa", padded=False)
    pictures = tmp_path / "pictures" / "part_00"
    pictures.mkdir(parents=True)
    names = []
    for i, data in enumerate(pack.members.values()):
        (pictures / f"{i:09d}.jpg").write_bytes(data)
        names.append(str(pictures / f"{i:09d}.jpg") if i % 2 else f"part_00/{i:09d}.jpg")
    folder = tmp_path / "row_packing_jsons"
    folder.mkdir()
    (folder / "ps_00000000.json").write_text(json.dumps({**pack.record, "images": names}))
    source = {"format": "packs", "path": str(folder), "task": "vqa"}
    run = make_run(source | {"image_root": str(pictures.parent)}, tmp_path / "out")
    assert pack_all(run).counts.packed == 12
    assert verify(run, deep=True).ok
    assert packed_in(run) == sorted(pack.expected)


def test_a_path_that_leads_elsewhere_is_set_aside(tmp_path: Path) -> None:
    pack = flat("vqa", padded=False, names={3: "../../outside.jpg"})
    (tmp_path / "outside.jpg").write_bytes(picture(3))
    path = write_pack(pack, tmp_path / "given", "files")
    run = make_run({"format": "packs", "path": str(path), "task": "vqa"}, tmp_path / "out")
    counts = pack_all(run).counts
    assert (counts.packed, counts.set_aside) == (11, {"path_outside_root": 1})
    assert "ps_00000000/3" not in {row["key"] for row in index_rows(run)}
