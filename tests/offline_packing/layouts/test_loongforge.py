"""Packs with LoongForge's fields: they are ours as well, and nothing of a sample is lost."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from offline_packing.errors import ConfigError
from offline_packing.layouts.loongforge import _room_of_images
from offline_packing.runs.run import Run
from task_encoders.media.image import VisionSettings, smart_resize
from tests.helpers.datasets import dialogue, image_bytes, index_rows, make_run, pack_all
from tests.helpers.energon_batches import batches_of
from tests.helpers.formats import lines
from tests.helpers.loongforge import CALL, SYSTEM
from tests.helpers.outputs import members_of
from tests.helpers.tiny_families import encoder_options
from tests.helpers.videos import make_video
from tests.scenarios import tools
from tests.world import World, task_encoder

LAYOUT: dict[str, Any] = {"output": {"layout": "loongforge"}}


@pytest.fixture
def packed(world: World) -> Run:
    return world.run(tools, model=model_of(world, "qwen3_vl"), **LAYOUT, pack={"seq_length": 1024})


def model_of(world: World, family: str) -> dict[str, Any]:
    """Return the section of a family with its tiny tokenizer."""
    return {"family": family, "processor": str(world.checkpoint(family)), **encoder_options(family)}


def test_a_family_that_it_encodes_otherwise_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'loongforge' holds no packs of qwen3_5: .* thought"):
        make_run(world.source(tools), tmp_path, model=model_of(world, "qwen3_5"), **LAYOUT)


def test_packs_hold_its_fields_and_ours(packed: Run) -> None:
    aside = pq.read_table(packed.workspace.plan / "set_aside.parquet").to_pylist()
    assert sorted(row["detail"].removeprefix("layout loongforge holds no ") for row in aside) == [
        "answer that begins with a line break",
        "answer untrained or cut, nor system or developer message further on",
        "empty system message",
        "image less than 28 pixels high or wide",
    ]
    conversations = [one for record in records_of(packed) for one in record["messages"]]
    messages = [message for one in conversations for message in one["messages"]]
    assert sum("tools" in one for one in conversations) == 3
    assert sum(one["messages"][0] == SYSTEM for one in conversations) == 4
    assert sum(message.get("tool_calls") == [CALL] for message in messages) == 3


def records_of(run: Run) -> list[dict[str, Any]]:
    """The JSON of each pack."""
    members = members_of(run.workspace.root).items()
    return [json.loads(data) for name, data in members if name.endswith(".json")]


def mixed_media(root: Path) -> tuple[Path, list[Any]]:
    """Write dialogues of one length with a picture of their own, with a video and with neither,
    twenty of each; one with both. Returns messages and media of all but the last."""
    root.mkdir()
    (root / "0.mkv").write_bytes(video := make_video(8, container="matroska"))
    records: list[dict[str, Any]] = []
    expected = []
    for i in range(10, 70):
        messages, picture = dialogue(f"What is {i}?", f"Blot {i}."), image_bytes(84, 56, "PNG", i)
        (root / f"{i}.png").write_bytes(picture)
        of_kind: Any = [{"images": [f"{i}.png"]}, {"videos": ["0.mkv"]}, {}][i % 3]
        mark, media = [("<image>", [picture]), ("<video>", [video]), ("", [])][i % 3]
        records.append({"id": f"{i}", "messages": messages, **of_kind})
        shown = dialogue(mark + f"What is {i}?", f"Blot {i}.")
        expected.append((shown, *media))
    both = {"images": ["10.png"], "videos": ["0.mkv"]}
    records.append({"id": "both", "messages": dialogue("What?", "A blot."), **both})
    (root / "data.jsonl").write_bytes(lines(records))
    return root / "data.jsonl", expected


def run_of(source: Path, output: Path, **pack: Any) -> Run:
    named = {"format": "jsonl", "path": str(source), "task": "bmr"}
    return make_run(named, output, pack={"seq_length": 512, **pack}, **LAYOUT)


def test_each_conversation_has_its_media_and_a_pack_those_of_one_type(tmp_path: Path) -> None:
    source, expected = mixed_media(tmp_path / "source")
    run = run_of(source, tmp_path / "out")
    counts = pack_all(run).counts
    assert (counts.packed, counts.set_aside) == (60, {"not_in_layout": 1})
    names = {"image": r"img\d+.png", "video": r"vid\d+.webm"}  # .mkv would stay undecoded
    members, found, seen = members_of(run.workspace.root), [], []
    for member in [name for name in members if name.endswith(".json")]:
        record = json.loads(members[member])
        seen.append(kind := record["media_type"])
        for one, files in zip(record["messages"], record["media_files"], strict=True):
            assert len(files) == (kind in names)
            assert all(re.fullmatch(names[kind], name) for name in files)
            media = [members[member.removesuffix("json") + name] for name in files]
            found.append((one["messages"], *media))
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert set(seen) == {"image", "video", "text"}
    assert len(seen) < 30


def test_packs_leave_room_for_the_newline_behind_each_sample(tmp_path: Path) -> None:
    """Two samples that fill a pack would be too long there."""
    messages = dialogue("What?", "A blot.")
    records = [{"messages": messages, "id": f"sample{i}"} for i in range(8)]
    (tmp_path / "data.jsonl").write_bytes(lines(records))
    run = run_of(tmp_path / "data.jsonl", tmp_path / "measured")
    pack_all(run)
    (length,) = {row["num_tokens"] for row in index_rows(run)}
    for spare, samples in ((0, 1), (1, 1), (2, 2)):
        run = run_of(tmp_path / "data.jsonl", tmp_path / f"{spare}", seq_length=2 * length + spare)
        pack_all(run)
        assert {len(record["messages"]) for record in records_of(run)} == {samples}


def test_room_for_images_of_any_size() -> None:
    """Resizing twice stays within it; images are not only small or large, but thin as well."""
    rng = np.random.default_rng(0)
    for least, most in ((65_536, 16_777_216), (65_536, 1 << 20), (4096, 1 << 20)):
        first, second = ((VisionSettings(patch_size=size), (least, most)) for size in (14, 16))
        grown = 0
        for _ in range(4000):
            size = np.exp(rng.uniform(np.log(20), np.log(3000), 2)).astype(int).tolist()
            height, width = smart_resize(*size, *second)
            rows, columns = smart_resize(*smart_resize(*size, *first), *second)
            grid = np.array([[1, height // 16, width // 16]])
            more = (rows * columns - height * width) // 32**2
            assert more <= _room_of_images(grid, least / 32**2)[0], size
            grown += more > 0
        assert grown > 300


def test_captions_are_those_of_the_llava_onevision_layout(world: World) -> None:
    """Packs that it reads as `packed_captioning`, with one image each; and we, as any."""
    runs = [
        world.run("captioning", output={"layout": layout})
        for layout in ("loongforge", "llava_onevision")
    ]
    records, others = map(records_of, runs)
    assert records == others
    dataset = yaml.safe_load((runs[0].workspace.nv_meta / "dataset.yaml").read_text())
    assert dataset["__class__"] == "CrudeWebdataset"
    assert dataset["subflavors"]["sample_type"] == "packed_captioning"


def test_our_task_encoder_reads_them(packed: Run, world: World) -> None:
    for run, count in ((packed, 14), (world.run("captioning", **LAYOUT), 40)):
        batches = batches_of(run.workspace.root, task_encoder(run))
        keys = [key for batch in batches for key in batch.sub_sample_keys]
        assert len(set(keys)) == len(keys) == count
