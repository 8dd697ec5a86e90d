"""LLaVA-OneVision-2 on packs of its layout: its processor, loader and task encoder, to the batch.

It is not a package: LLAVA_ONEVISION_2 names a checkout of EvolvingLMMs-Lab/LLaVA-OneVision-2.
"""

import json
import os
import shutil
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets import megatron_tokenizer

from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packs.pack import Pack, SubSample, parse_json, sub_samples_of_pack
from task_encoders.text.pieces import to_messages
from tests.helpers.layout_readers import OwnCode, pack_by_command, said_of, sub_samples
from tests.helpers.texts_and_images import random_sample
from tests.peers import Say

if not os.environ.get("LLAVA_ONEVISION_2"):
    pytest.skip("LLAVA_ONEVISION_2=DIR names no checkout of it", allow_module_level=True)
CHECKOUT = Path(os.environ["LLAVA_ONEVISION_2"]).resolve()
OWN_CODE = CHECKOUT / "transformers_impl/llavaonevision2"

VERSION = f"LLaVA-OneVision-2 on energon {version('megatron-energon')}"
FAMILY = "llava_onevision_2"
SEQ_LENGTH = 2048
# Its copy of megatron-core calls the base of tokenizers otherwise.
megatron_tokenizer.MegatronTokenizer = megatron_tokenizer.MegatronLegacyTokenizer
OWN = OwnCode(
    "aiak_training_llm",
    "chat_templete",
    ("multimodal.qwen2vl_task_encoder", "Qwen2VLTaskEncoder"),
    "multimodal.task_encoder",
)
OWN.install(CHECKOUT)


def save_checkpoint(folder: Path, **sizes: int) -> dict[str, Any]:
    """A folder with its processor, which is its own code, and the options that suit it."""
    own = builtin_processor(FAMILY, **sizes)
    own.save_pretrained(folder)
    for name in ("processing_llava_onevision2.py", "video_processing_llava_onevision2.py"):
        shutil.copy(OWN_CODE / name, folder)
    kind = "Llava_Onevision2Processor"
    described = json.loads((folder / "processor_config.json").read_bytes())
    images = described["image_processor"] | {"image_processor_type": "Qwen2VLImageProcessor"}
    images |= {
        "processor_class": kind,
        "auto_map": {"AutoProcessor": f"processing_llava_onevision2.{kind}"},
    }
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return {"family": FAMILY, "processor": str(folder), **sizes}


def conversations(root: Path, count: int) -> Path:
    """Conversations of several images, and every eighth of one, turned by EXIF or not, or none."""
    rng = np.random.default_rng(count)
    root.mkdir()
    lines = []
    for i in range(count):
        kind = (
            ("one_image", "exif", "text_only", "chinese")[i // 8 % 4]
            if i % 8 == 0
            else "multi_image"
        )
        sample, _ = random_sample(rng, kind, i, root)
        turns = [replace(turn, answer=turn.answer.lstrip()) for turn in sample.turns]
        messages = to_messages(replace(sample, turns=tuple(turns)))
        lines.append(json.dumps({"id": sample.key, "messages": messages, "images": sample.images}))
    (root / "data.jsonl").write_text("\n".join(lines))
    return root / "data.jsonl"


def pack(root: Path, source: Path, model: dict[str, Any]) -> Path:
    """Packs in its layout."""
    jsonl = {"format": "jsonl", "path": str(source), "task": "bmr"}
    return pack_by_command(root, jsonl, model, layout="llava_onevision2", seq_length=SEQ_LENGTH)


@pytest.mark.parametrize(
    ("patch_size", "merge_size", "count"), [(14, 2, 350), (14, 3, 60), (16, 2, 60), (16, 3, 60)]
)
def test_every_batch_is_what_its_encoder_makes_of_the_pack(
    patch_size: int, merge_size: int, count: int, tmp_path: Path, say: Say
) -> None:
    sizes = {"patch_size": patch_size, "merge_size": merge_size, "max_pixels": 120_000}
    model = save_checkpoint(tmp_path / "checkpoint", **sizes)
    packed = pack(tmp_path, conversations(tmp_path / "source", count), model)
    # As in its quick start.
    given = {"min_pixels": None, "max_pixels": None, "length_sort_pool_size": 0}
    theirs = OWN.task_encoder(tmp_path / "checkpoint", "qwen2-vl", seq_length=SEQ_LENGTH, **given)
    compared = OWN.compare(packed, theirs, model)
    assert compared["of several images"] > count * 0.8
    say(f"p{patch_size}m{merge_size}: {said_of(compared)}: batches equal")


def test_packs_are_as_its_packer_writes_them_and_its_own_are_read(tmp_path: Path, say: Say) -> None:
    """But for the names in the JSON, of which its loader takes the number."""
    sys.path.append(str(CHECKOUT / "offline_packing"))
    from s4_bins_to_webdataset import build_direct_sample
    from s4_pack_samples import PackSamplesConfig, SamplePacker

    model = save_checkpoint(tmp_path / "checkpoint")
    packed = pack(tmp_path, conversations(tmp_path / "source", 60), model)
    (tmp_path / "its").mkdir()
    packer = SamplePacker(PackSamplesConfig(source_dir=str(tmp_path / "its")))
    count = 0
    for raw in PackedFolder(packed):
        record, ours = parse_json(raw.record, raw.key), sub_samples(raw, "bmr")
        bins = [
            {"name": save_source(one, tmp_path / "its", count + i)} for i, one in enumerate(ours)
        ]
        theirs = build_direct_sample(packer, 0, bins)
        described = json.loads(theirs.pop("json"))
        assert theirs.pop("__key__")
        assert theirs == raw.media
        assert [*theirs] == [*raw.media]
        images = described.pop("images")
        assert [len(own) for own in images] == [len(own) for own in record["images"]]
        assert described == {name: record[name] for name in described}
        assert record.keys() - described.keys() == {"images", "meta"}
        again = Pack(raw.key, {**described, "images": images}, theirs)
        for one, other in zip(ours, sub_samples_of_pack(again, "bmr"), strict=True):
            assert other.images == one.images
            assert other.sample.turns == one.sample.turns
        count += len(ours)
    assert count == 60
    say(f"its packer writes the same members and fields for {count} samples")


def save_source(one: SubSample, folder: Path, number: int) -> str:
    """Write a sample as the packer's first step leaves it; returns its name."""
    names = [f"{number}_{j}.jpg" for j in range(len(one.images))]
    for name, data in zip(names, one.images, strict=True):
        (folder / name).write_bytes(data)
    record = {"images": names, "messages": to_messages(one.sample)}
    (folder / f"{number}.json").write_text(json.dumps(record))
    return str(number)
