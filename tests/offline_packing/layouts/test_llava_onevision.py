"""Packs for LLaVA-OneVision-1.5 and 2: their form, and what they cannot hold.
tests/peers/test_llava_onevision_2.py reads packs for the second with its own task encoder."""

import io
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from offline_packing.errors import ConfigError, StageError
from offline_packing.layouts import LAYOUTS, unfit
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.records.record import to_sample
from task_encoders.samples import SampleError, SourceSample, Turn
from task_encoders.text.qwen_templates import QWEN3_VL_TEMPLATE
from tests.helpers.datasets import (
    dialogue,
    image_bytes,
    make_config,
    make_run,
    pack_all,
    write_json,
)
from tests.helpers.formats import write_file
from tests.helpers.tiny_tokenizers import save_with_template, tiny_tokenizer
from tests.world import Source, World

#: The layouts, and the family of the trainer that reads the second.
ONE: dict[str, Any] = {"output": {"layout": "llava_onevision"}}
TWO: dict[str, Any] = {
    "output": {"layout": "llava_onevision2"},
    "model": {"family": "llava_onevision_2"},
}


def pairs(folder: Path, task: str) -> dict[str, Any]:
    return {"format": "pairs", "path": str(folder), "task": task}


def questions(folder: Path) -> Source:
    """Write one picture and one question each; some say where the picture goes."""
    for i in range(12):
        write_file(folder / f"{i % 3}.png", image_bytes(28 * (2 + i % 3), 84, "PNG"))
        prompt = "<image>\n" * (i % 2) + f"How many squares are in picture {i}?"
        record = {"question": prompt, "answer": f"There are {i}.", "images": [f"{i % 3}.png"]}
        write_json(folder / f"record{i:02d}.json", record)
    return pairs(folder, "vqa")


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
    for pack in PackedFolder(root):
        names = [f"img{i}.jpg" for i in range(len(pack.media))]
        assert [*pack.media] == pack.record["images"] == names
        assert pack.record.keys() - {"meta"} == {"images", "prompts", "captions"}
        assert all(loader["part_filter"](name) for name in names)
        read = loader["sample_loader"]({"__key__": "k", **pack.media, "json": pack.record})
        texts = {name: pack.record[name] for name in ("captions", "prompts")}
        assert read == {"__key__": "k", "images": [*pack.media.values()], **texts}
        assert len(names) == len(texts["captions"]) == len(texts["prompts"])
        marks = int(source is questions)
        assert {prompt.count("<image>") for prompt in texts["prompts"]} == {marks}
        assert not any("<image>" in caption for caption in texts["captions"])
        for data in read["images"]:
            Image.open(io.BytesIO(data)).load()
        num_samples += len(names)
    assert num_samples == manifest.counts.packed
    meta = {path.name: yaml.safe_load(path.read_text()) for path in root.glob(".nv-meta/*.yaml")}
    assert meta[".info.yaml"] == {"shard_counts": {s.name: s.packs for s in manifest.shards}}
    assert meta["dataset.yaml"] == {
        "sample_type": {
            "__module__": "aiak_training_llm.data.multimodal",
            "__class__": "PackedCaptioningSample",
        },
        "part_filter": "sample_loader.py:part_filter",
        "sample_loader": "sample_loader.py:sample_loader",
    }


@pytest.mark.parametrize(("source", "images"), [(questions, {1}), ("bmr", {0, 1, 2})])
def test_packs_of_the_second_are_as_its_packer_writes_them(
    source: Any, images: set[int], world: World
) -> None:
    root = world.packed(source, **TWO)
    loader, seen = written_loader(root), Counter[int]()
    for pack in PackedFolder(root):
        record = pack.record
        names, texts = record["images"], {name: record[name] for name in ("prompts", "captions")}
        counts = [len(own) for own in names]
        others = {"sample_count": len(names), "timestamp_decimal": [1] * len(names)}
        others["patch_positions"] = [[""] * count for count in counts]
        assert record == {"images": names, **texts, **others, "meta": record["meta"]}
        flat = [f"img{i}_{j}.jpg" for i, count in enumerate(counts) for j in range(count)]
        assert [*pack.media] == [*itertools.chain(*names)] == flat
        assert [len(one) for one in texts["prompts"]] == [len(one) for one in texts["captions"]]
        assert ["".join(one).count("<image>") for one in texts["prompts"]] == counts
        seen.update(counts)
        read = loader["sample_loader"]({"__key__": "k", **pack.media, "json": record})
        shown = [[pack.media[name] for name in own] for own in names]
        assert read == {"__key__": "k", "images": shown, **texts}
    assert seen.keys() == images
    assert seen.total() == require_manifest(root).counts.packed


SYSTEM = {"role": "system", "content": "Be brief."}
#: What both templates write by themselves.
DEFAULT = {"role": "system", "content": "You are a helpful assistant."}
TAGS = "text that spells control tokens, nor <image> in an answer"
NOT_ONE = "sample without exactly one image"
UNTRAINED = [*dialogue("Q"), {**dialogue("Q", "A")[1], "loss_weight": 0.5}]
CODEC = "codec input (patch_positions of LLaVA-OneVision-2) is not packed"
PICTURE = (56, 84)


@pytest.mark.parametrize(
    ("number", "messages", "fields", "sizes", "why"),
    [
        (1, dialogue("How?", "So."), {}, [], NOT_ONE),
        (1, dialogue("Which?", "No."), {"images": ["0.png", "1.png"]}, [PICTURE] * 2, NOT_ONE),
        (1, dialogue("Q", "A", "More?", "B"), {}, [PICTURE], "sample of several turns"),
        (1, [SYSTEM, *dialogue("What?", "That.")], {}, [PICTURE], "system message"),
        (1, dialogue("<image>?", "Write <image>."), {}, [PICTURE], f"{TAGS} or document"),
        (1, dialogue("<|image_pad|>?", "A token."), {}, [PICTURE], f"{TAGS} or document"),
        (1, dialogue("?", "Yes."), {}, [(3, 90)], "image 1 or 3 pixels high or wide"),
        (1, [DEFAULT, *dialogue("What?", "That.")], {}, [PICTURE], None),
        (2, [SYSTEM, *dialogue("What?", "That.")], {}, [], "system message"),
        (2, UNTRAINED, {}, [], "tools, thoughts, or answers without loss or end token"),
        (2, dialogue("<image>?", "Write <image>."), {}, [PICTURE], TAGS),
        (2, dialogue("<image> <video>?", "A tag."), {}, [PICTURE], "such text elsewhere, nor <vi"),
        (2, dialogue("Why?", "\nSo."), {}, [], "answer that begins with a line break"),
        (2, dialogue("?", "Yes."), {}, [(27, 300)], "image less than 28 pixels high or wide"),
        (2, dialogue("?", "It ends."), {"videos": ["a.mp4"]}, [], "video file: give its frames"),
        (2, dialogue("<image>?", "A."), {"patch_positions": ["0.npy"]}, [PICTURE], CODEC),
        (2, [DEFAULT, *dialogue("<image>?", "That.")], {}, [PICTURE], None),
        (2, dialogue("<image>?", "A."), {"patch_positions": [""], "fps": [30]}, [PICTURE], None),
    ],
)
def test_samples_that_they_cannot_hold(
    number: int, messages: Any, fields: dict[str, Any], sizes: unfit.Sizes, why: str | None
) -> None:
    """Their loaders cannot use them, or train them as something else."""
    layout, task = [("llava_onevision", "vqa"), ("llava_onevision2", "bmr")][number - 1]
    images = [f"{i}.png" for i in range(len(sizes))]
    try:
        sample = to_sample({"messages": messages, "images": images, **fields}, "k", task)
        found = LAYOUTS[layout].unfit(sample, sizes, {})
    except SampleError as error:
        found = error.detail
    assert found == why or (why and found and found.startswith(why))


def test_a_sample_that_got_another_turn_is_named() -> None:
    sample = SourceSample("odd", "vqa", (Turn("Q?", "A."),) * 2, ("a.png",))
    with pytest.raises(StageError, match="'odd' changed since it was measured: it has 2 turns"):
        LAYOUTS["llava_onevision"].stored_form(sample)


@pytest.mark.parametrize(
    ("layout", "task", "model", "message"),
    [
        ("llava_onevision", "bmr", {}, "holds captioning and vqa only, not bmr"),
        ("llava_onevision2", "captioning", {}, "holds vqa and bmr only, not captioning"),
        ("llava_onevision2", "vqa", {"loss_on": "last"}, "but output.layout='.*2' trains all"),
        (
            "llava_onevision2",
            "vqa",
            {"empty_thoughts": "mask"},
            "model.empty_thoughts=mask trains only a",
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
