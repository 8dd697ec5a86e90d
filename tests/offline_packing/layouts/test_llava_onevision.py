"""Packs for LLaVA-OneVision-1.5 and 2: their form, what they cannot hold, and our task encoder on
those of the second. tests/peers/test_llava_onevision_2.py reads such packs with its own."""

import io
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from offline_packing.errors import ConfigError, StageError
from offline_packing.layouts import LAYOUTS
from offline_packing.measure.measure import measure
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.storage.tars import scan_tar
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packs.pack import Pack, sub_samples_of_pack
from task_encoders.text.qwen_templates import QWEN3_VL_TEMPLATE
from tests.helpers.datasets import (
    dialogue,
    image_bytes,
    make_config,
    make_run,
    pack_all,
    plan_index,
    write_json,
    write_planned,
)
from tests.helpers.tiny_tokenizers import save_with_template, tiny_tokenizer
from tests.helpers.videos import make_video
from tests.world import Source, World, task_encoder

#: The layouts, and the family of the trainer that reads the second.
ONE: dict[str, Any] = {"output": {"layout": "llava_onevision"}}
TWO: dict[str, Any] = {
    "output": {"layout": "llava_onevision2"},
    "model": {"family": "llava_onevision_2"},
}


def pictures(root: Path) -> list[str]:
    root.mkdir(parents=True, exist_ok=True)
    names = [f"{i}.png" for i in range(3)]
    for i, name in enumerate(names):
        (root / name).write_bytes(image_bytes(28 * (2 + i), 84, "PNG"))
    return names


def pairs(folder: Path, task: str) -> dict[str, Any]:
    return {"format": "pairs", "path": str(folder), "task": task}


def questions(folder: Path) -> Source:
    """Write one picture and one question each; some say where the picture goes."""
    names = pictures(folder)
    for i in range(12):
        prompt = "<image>\n" * (i % 2) + f"How many squares are in picture {i}?"
        record = {"question": prompt, "answer": f"There are {i}.", "images": [names[i % 3]]}
        write_json(folder / f"record{i:02d}.json", record)
    return pairs(folder, "vqa")


def conversations(folder: Path) -> Source:
    """Write dialogues on no image to three, before, in and between the questions, or marked
    nowhere."""
    names = pictures(folder)
    for i in range(24):
        images, marks = names[: i % 4], ["<image>"] * (i % 4) if i % 3 else []
        prompts = ["".join(marks[:1]) + f"What is {i}?", "And" + "".join(marks[1:]) + " then?"]
        messages = dialogue(prompts[0], "A number.", prompts[1], f"Another: {i + 1}.")
        record = {"messages": messages[: 2 if i % 4 < 2 else 4], "images": images}
        write_json(folder / f"record{i:02d}.json", record)
    return pairs(folder, "bmr")


def written_loader(folder: Path) -> dict[str, Any]:
    """Return the names of the loader that an output brings for its trainer."""
    names: dict[str, Any] = {}
    exec((folder / ".nv-meta/sample_loader.py").read_text(), names)
    return names


@pytest.mark.parametrize("source", ["captioning", questions])
def test_packs_of_one_picture_each(source: Any, world: World) -> None:
    root = world.packed(source, **ONE)
    manifest, loader = require_manifest(root), written_loader(root)
    num_samples = 0
    for path in sorted(root.glob("*.tar")):
        offsets = np.fromfile(path.with_suffix(".tar.idx"), dtype="<u8").tolist()
        entries = list(scan_tar(path))
        assert offsets == [*(e.offset for e in entries), entries[-1].offset + entries[-1].size]
        data = path.read_bytes()
        for entry in entries:
            parts = {part.name: data[part.offset :][: part.size] for part in entry.parts}
            num_samples += check_pack(loader, int(source is questions), parts)
    assert num_samples == manifest.counts.packed
    meta = {path.name: yaml.safe_load(path.read_text()) for path in root.glob(".nv-meta/*.yaml")}
    assert meta[".info.yaml"] == {"shard_counts": {s.name: s.packs for s in manifest.shards}}
    assert meta["split.yaml"]["split_parts"]["train"] == [shard.name for shard in manifest.shards]
    assert meta["split.yaml"]["exclude"] == []
    assert meta["dataset.yaml"] == {
        "sample_type": {
            "__module__": "aiak_training_llm.data.multimodal",
            "__class__": "PackedCaptioningSample",
        },
        "part_filter": "sample_loader.py:part_filter",
        "sample_loader": "sample_loader.py:sample_loader",
    }


def check_pack(loader: dict[str, Any], marks: int, parts: dict[str, bytes]) -> int:
    """Check all that their loader needs in a pack; return its number of sub-samples."""
    assert list(parts) == [*(f"img{i}.jpg" for i in range(len(parts) - 1)), "json"]
    record = json.loads(parts["json"])
    assert record["images"] == list(parts)[:-1]
    assert set(record) - {"meta"} == {"images", "prompts", "captions"}
    assert all(loader["part_filter"](name) for name in parts)
    sample = loader["sample_loader"]({"__key__": "k", **parts, "json": record})
    assert set(sample) == {"__key__", "images", "captions", "prompts"}
    assert len(sample["images"]) == len(sample["captions"]) == len(sample["prompts"])
    assert {prompt.count("<image>") for prompt in sample["prompts"]} == {marks}
    assert not any("<image>" in caption for caption in sample["captions"])
    for data in sample["images"]:
        Image.open(io.BytesIO(data)).load()
    return len(sample["images"])


@pytest.mark.parametrize(("source", "images"), [(questions, {1}), (conversations, {0, 1, 2, 3})])
def test_packs_of_the_second_are_as_its_packer_writes_them(
    source: Any, images: set[int], world: World
) -> None:
    """Our encoder makes of them what it makes of the samples alone."""
    run = world.run(source, **TWO)
    task, encoder, loader = run.config.task, task_encoder(run), written_loader(run.workspace.root)
    encoded, seen = PackedFolder(run.workspace.root, encoder), Counter[int]()
    for number, pack in enumerate(PackedFolder(run.workspace.root)):
        record = pack.record
        names = record["images"]
        assert names == [
            [f"img{i}_{j}.jpg" for j in range(len(own))] for i, own in enumerate(names)
        ]
        assert [*pack.media] == [*itertools.chain(*names)]
        assert record.keys() - {"images", "prompts", "captions", "meta"} == {
            *("sample_count", "patch_positions", "timestamp_decimal")
        }
        assert record["sample_count"] == len(names)
        assert record["patch_positions"] == [[""] * len(own) for own in names]
        assert record["timestamp_decimal"] == [1] * len(names)
        for own, prompts, answers in zip(names, record["prompts"], record["captions"], strict=True):
            assert len(prompts) == len(answers)
            assert "".join(prompts).count("<image>") == len(own)
            seen[len(own)] += 1
        read = loader["sample_loader"]({"__key__": "k", **pack.media, "json": record})
        assert read == {
            "__key__": "k",
            "images": [[pack.media[name] for name in own] for own in names],
            "prompts": record["prompts"],
            "captions": record["captions"],
        }
        subs = sub_samples_of_pack(Pack(pack.key, record, pack.media), task)
        alone = [encoder.encoder.encode(one.sample, one.images) for one in subs]  # type: ignore[arg-type]
        row = encoded.row(number).row
        assert row.tokens.tolist() == np.concatenate([one.tokens for one in alone]).tolist()
        grids = [grid for one in alone for grid in one.image_grid_thw.tolist()]
        assert row.image_grid_thw.tolist() == grids
    assert seen.keys() == images
    assert seen.total() == require_manifest(run.workspace.root).counts.packed


def of_one(*texts: str, **more: Any) -> dict[str, Any]:
    """Return a dialogue about the first picture."""
    return {"messages": dialogue(*texts), "images": ["0.png"], **more}


SYSTEM = {"role": "system", "content": "Be brief."}
#: What both templates write by themselves.
DEFAULT = {"role": "system", "content": "You are a helpful assistant."}
TAGS = "text that spells control tokens, nor <image> in an answer or document"
NOT_ONE = "sample without exactly one image"
#: Samples that its loader cannot use, or trains as something else: with why, or "" if they fit.
UNFIT_ONE: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"question": "How?", "answer": "So.", "images": []}, NOT_ONE),
    "two": ({"question": "Which?", "answer": "No.", "images": ["0.png", "1.png"]}, NOT_ONE),
    "turns": (of_one("Q", "A", "More?", "B"), "sample of several turns"),
    "system": (
        {"messages": [SYSTEM, *dialogue("What?", "That.")], "images": ["0.png"]},
        "system message",
    ),
    "tag": (of_one("<image>Tag?", "Write <image>."), TAGS),
    "pad": (of_one("What is <|image_pad|>?", "A token."), TAGS),
    "thin": (of_one("A line?", "Yes.", images=["thin.png"]), "image 1 or 3 pixels high or wide"),
    "default": ({"messages": [DEFAULT, *dialogue("What?", "That.")], "images": ["0.png"]}, ""),
}
UNFIT_TWO: dict[str, tuple[dict[str, Any], str]] = {
    "system": ({"messages": [SYSTEM, *dialogue("What?", "That.")]}, "system message"),
    "loss": (
        {"messages": [*dialogue("Q"), {**dialogue("Q", "A")[1], "loss_weight": 0.5}]},
        "tools, thoughts, or answers without loss or end token",
    ),
    "tag": (
        of_one("<image>Tag?", "Write <image>."),
        "text that spells control tokens, nor <image> in an answer",
    ),
    "video_tag": (of_one("<image>What is <video>?", "A tag."), "such text elsewhere, nor <video>"),
    "break": ({"messages": dialogue("Why?", "\nSo.")}, "answer that begins with a line break"),
    "small": (
        of_one("A line?", "Yes.", images=["small.png"]),
        "image less than 28 pixels high or wide",
    ),
    "film": (
        {"messages": dialogue("What happens?", "It ends."), "videos": ["film.mp4"]},
        "family llava_onevision_2 takes no videos",
    ),
    "codec": (
        of_one("<image>What?", "That.", patch_positions=["0.npy"]),
        "codec input (patch_positions of LLaVA-OneVision-2) is not packed",
    ),
    "default": (
        {"messages": [DEFAULT, *dialogue("<image>What?", "That.")], "images": ["0.png"]},
        "",
    ),
    "no_codec": (of_one("<image>What?", "That.", patch_positions=[""], fps=[30]), ""),
}


@pytest.mark.parametrize(
    ("sections", "task", "records"), [(ONE, "vqa", UNFIT_ONE), (TWO, "bmr", UNFIT_TWO)]
)
def test_samples_that_they_cannot_hold_are_set_aside(
    sections: dict[str, Any], task: str, records: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "data"
    source = questions(root)
    (root / "thin.png").write_bytes(image_bytes(90, 3, "PNG"))
    (root / "small.png").write_bytes(image_bytes(300, 27, "PNG"))
    (root / "film.mp4").write_bytes(make_video(4))
    for name, (record, _) in records.items():
        write_json(root / f"{name}.json", {"images": [], **record})
    assert isinstance(source, dict)
    run = make_run({**source, "task": task}, tmp_path / "out", **sections)
    counts = pack_all(run).counts
    reasons = {name: why for name, (_, why) in records.items() if why}
    assert counts.packed == 12 + len(records) - len(reasons)
    files = [run.workspace.plan / "set_aside.parquet", *run.workspace.set_aside.glob("*.parquet")]
    aside = {row["key"]: row["detail"] for file in files for row in pq.read_table(file).to_pylist()}
    prefix = f"layout {run.config.output.layout} holds no "
    assert {name: detail.removeprefix(prefix) for name, detail in aside.items()} == reasons


def test_video_files_of_other_families_are_set_aside_too(tmp_path: Path) -> None:
    source = questions(tmp_path / "data")
    (tmp_path / "data/film.mp4").write_bytes(make_video(4))
    write_json(tmp_path / "data/film.json", UNFIT_TWO["film"][0] | {"images": []})
    run = make_run(source, tmp_path / "out", output=TWO["output"])
    assert pack_all(run).counts.set_aside == {"not_in_layout": 1}
    (row,) = pq.read_table(run.workspace.plan / "set_aside.parquet").to_pylist()
    assert row["detail"] == (
        "layout llava_onevision2 holds no video file: give its frames as images"
    )


def test_captions_may_be_about_tags(tmp_path: Path) -> None:
    """A caption goes through no template, so nothing in it becomes an image."""
    (tmp_path / "data").mkdir()
    write_json(tmp_path / "data/tag.json", {"caption": "The words <video> and </image>."})
    (tmp_path / "data/tag.png").write_bytes(image_bytes(image_format="PNG"))
    run = make_run(pairs(tmp_path / "data", "captioning"), tmp_path / "out", **ONE)
    counts = pack_all(run).counts
    assert (counts.packed, counts.set_aside) == (1, {})
    assert verify(run, deep=True).ok


def test_a_sample_that_got_another_turn_is_named(tmp_path: Path) -> None:
    source = questions(tmp_path / "data")
    short, long = (json.dumps(of_one(*("Q?", "A.") * n)) for n in (1, 2))
    path = tmp_path / "data/odd.json"
    path.write_text(short.ljust(len(long)))
    run = make_run(source, tmp_path / "out", **ONE)
    measure(run)
    plan_index(run)
    path.write_text(long)
    with pytest.raises(StageError, match="'odd' changed since it was measured: it has 2 turns"):
        write_planned(run)


@pytest.mark.parametrize(
    ("layout", "task", "model", "message"),
    [
        ("llava_onevision", "bmr", {}, "holds captioning and vqa only, not bmr"),
        ("llava_onevision2", "captioning", {}, "holds vqa and bmr only, not captioning"),
        ("llava_onevision2", "vqa", {"loss_on": "last"}, "and output.layout='.*2' trains all"),
        (
            "llava_onevision2",
            "vqa",
            {"empty_thoughts": "mask"},
            "model.empty_thoughts=mask trains a",
        ),
        ("tar", "vqa", {}, f"choose one of: {', '.join(LAYOUTS)}"),
    ],
)
def test_what_a_layout_does_not_hold_is_refused(
    layout: str, task: str, model: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = pairs(tmp_path / "data", task)
    with pytest.raises(ConfigError, match=message):
        make_config(source, tmp_path / "out", output={"layout": layout}, model=model)


def test_a_template_that_its_trainer_would_not_write_is_refused(
    world: World, tmp_path: Path
) -> None:
    save_with_template(tiny_tokenizer(), QWEN3_VL_TEMPLATE, tmp_path / "checkpoint")
    model = {**TWO["model"], "processor": str(tmp_path / "checkpoint")}
    run: Run = make_run(world.source(questions), tmp_path / "out", **{**TWO, "model": model})
    with pytest.raises(StageError, match="something else than the template qwen2-vl"):
        pack_all(run)
