"""Packs for LLaVA-OneVision-2: their form, what they cannot hold, and our task encoder on them.
tests/peers/test_llava_onevision_2.py reads such packs with its own."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import ConfigError, StageError
from offline_packing.runs.run import Run
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
    write_json,
)
from tests.helpers.energon_batches import encoder_of
from tests.helpers.tiny_tokenizer import save_with_template, tiny_tokenizer
from tests.helpers.videos import make_video

LAYOUT = {"layout": "llava_onevision2"}


def make(folder: Path, root: Path, task: str = "bmr", **model: Any) -> Run:
    source = {"format": "pairs", "path": str(root), "task": task}
    return make_run(source, folder, model={"family": "llava_onevision_2", **model}, output=LAYOUT)


def pictures(root: Path) -> list[str]:
    root.mkdir(parents=True)
    names = [f"{i}.png" for i in range(3)]
    for i, name in enumerate(names):
        (root / name).write_bytes(image_bytes(28 * (2 + i), 84, "PNG"))
    return names


def questions(root: Path) -> Path:
    names = pictures(root)
    for i in range(12):
        record = {"question": f"How many in {i}?", "answer": f"There are {i}.", "images": names[:1]}
        write_json(root / f"record{i:02d}.json", record)
    return root


def conversations(root: Path) -> Path:
    """Of no image to three, before, in and between the questions, or marked nowhere."""
    names = pictures(root)
    for i in range(24):
        images, marks = names[: i % 4], ["<image>"] * (i % 4) if i % 3 else []
        prompts = ["".join(marks[:1]) + f"What is {i}?", "And" + "".join(marks[1:]) + " then?"]
        messages = dialogue(prompts[0], "A number.", prompts[1], f"Another: {i + 1}.")
        record = {"messages": messages[: 2 if i % 4 < 2 else 4], "images": images}
        write_json(root / f"record{i:02d}.json", record)
    return root


@pytest.mark.parametrize("task", ["vqa", "bmr"])
def test_packs_are_as_its_packer_writes_them_and_read_by_our_encoder(
    tmp_path: Path, task: str
) -> None:
    write = {"vqa": questions, "bmr": conversations}[task]
    run = make(tmp_path / "out", write(tmp_path / "data"), task)
    counts, encoder = pack_all(run).counts, encoder_of(run)
    assert counts.set_aside == {}
    assert verify(run, deep=True).ok
    code: dict[str, Any] = {}
    exec((run.workspace.nv_meta / "sample_loader.py").read_text(), code)
    encoded, seen = PackedFolder(run.workspace.root, encoder), Counter[int]()
    for number, pack in enumerate(PackedFolder(run.workspace.root)):
        record = json.loads(pack.record)
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
        read = code["sample_loader"]({"__key__": "k", **pack.media, "json": record})
        assert read == {
            "__key__": "k",
            "images": [[pack.media[name] for name in own] for own in names],
            "prompts": record["prompts"],
            "captions": record["captions"],
        }
        subs = sub_samples_of_pack(Pack(pack.key, record, pack.media), task, "")
        alone = [encoder.encoder.encode(one.sample, one.images) for one in subs]  # type: ignore[arg-type]
        row = encoded.row(number).row
        assert row.tokens.tolist() == np.concatenate([one.tokens for one in alone]).tolist()
        assert row.cu_lengths.diff().tolist() == [len(one.tokens) for one in alone]
        assert row.image_grid_thw.tolist() == [
            grid for one in alone for grid in one.image_grid_thw.tolist()
        ]
    assert set(seen) == ({1} if task == "vqa" else {0, 1, 2, 3})
    assert seen.total() == counts.packed


#: Samples that its loader cannot use, or trains as something else.
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "system": (
        {"messages": [{"role": "system", "content": "Be brief."}, *dialogue("What?", "That.")]},
        "system message",
    ),
    "loss": (
        {"messages": [*dialogue("Q"), {**dialogue("Q", "A")[1], "loss_weight": 0.5}]},
        "tools, thoughts, or answers without loss or end token",
    ),
    "tag": (
        {"messages": dialogue("<image>Tag?", "Write <image>."), "images": ["0.png"]},
        "text that spells control tokens, nor <image> in an answer",
    ),
    "video_tag": (
        {"messages": dialogue("<image>What is <video>?", "A tag."), "images": ["0.png"]},
        "such text elsewhere, nor <video>",
    ),
    "break": (
        {"messages": dialogue("Why?", "\nSo.")},
        "answer that begins with a line break",
    ),
    "small": (
        {"messages": dialogue("A line?", "Yes."), "images": ["small.png"]},
        "image less than 28 pixels high or wide",
    ),
    "film": (
        {"messages": dialogue("What happens?", "It ends."), "videos": ["film.mp4"]},
        "",
    ),
    "codec": (
        {
            "messages": dialogue("<image>What?", "That."),
            "images": ["0.png"],
            "patch_positions": ["0.npy"],
        },
        "",
    ),
}


def test_samples_that_it_cannot_hold_are_set_aside(tmp_path: Path) -> None:
    root = conversations(tmp_path / "data")
    (root / "small.png").write_bytes(image_bytes(300, 27, "PNG"))
    (root / "film.mp4").write_bytes(make_video(4))
    for name, (record, _) in UNFIT.items():
        write_json(root / f"{name}.json", {"images": [], **record})
    plain = dialogue("<image>What?", "That.")
    default = [{"role": "system", "content": "You are a helpful assistant."}, *plain]
    fit = {
        "default": {"messages": default, "images": ["0.png"]},  # what its template writes
        "no_codec": {"messages": plain, "images": ["0.png"], "patch_positions": [""], "fps": [30]},
    }
    for name, record in fit.items():
        write_json(root / f"{name}.json", record)
    run = make(tmp_path / "out", root)
    assert pack_all(run).counts.packed == 24 + len(fit)
    files = [*run.workspace.plan.glob("set_aside.parquet")]
    files += sorted(run.workspace.set_aside.glob("*.parquet"))
    aside = {row["key"]: row["detail"] for file in files for row in pq.read_table(file).to_pylist()}
    assert aside == {
        **{name: f"layout llava_onevision2 holds no {why}" for name, (_, why) in UNFIT.items()},
        "film": "family llava_onevision_2 takes no videos",
        "codec": "codec input (patch_positions of LLaVA-OneVision-2) is not packed",
    }


def test_video_files_of_other_families_are_set_aside_too(tmp_path: Path) -> None:
    root = conversations(tmp_path / "data")
    (root / "film.mp4").write_bytes(make_video(4))
    write_json(root / "film.json", UNFIT["film"][0])
    source = {"format": "pairs", "path": str(root), "task": "bmr"}
    run = make_run(source, tmp_path / "out", output=LAYOUT)
    assert pack_all(run).counts.set_aside == {"not_in_layout": 1}
    (row,) = pq.read_table(run.workspace.plan / "set_aside.parquet").to_pylist()
    assert row["detail"] == (
        "layout llava_onevision2 holds no video file: give its frames as images"
    )


def test_what_its_trainer_would_write_or_train_otherwise_is_refused(tmp_path: Path) -> None:
    root = questions(tmp_path / "data")
    source = {"format": "pairs", "path": str(root), "task": "vqa"}
    for more, message in (
        ({"source": {**source, "task": "captioning"}}, "holds vqa and bmr only, not captioning"),
        ({"model": {"loss_on": "last"}}, "readers of output.layout='llava_onevision2' train all"),
    ):
        given = {"source": source, **more}
        with pytest.raises(ConfigError, match=message):
            make_config(given.pop("source"), tmp_path / "out", output=LAYOUT, **given)
    save_with_template(tiny_tokenizer(), QWEN3_VL_TEMPLATE, tmp_path / "checkpoint")
    run = make(tmp_path / "out", root, "vqa", processor=str(tmp_path / "checkpoint"))
    with pytest.raises(StageError, match="something else than the template qwen2-vl"):
        pack_all(run)
