"""LLaVA-OneVision-2 on packs of its layout: its processor, loader and task encoder, to the batch.

It is not a package: LLAVA_ONEVISION_2 names a checkout of EvolvingLMMs-Lab/LLaVA-OneVision-2.
"""

import io
import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets import megatron_tokenizer
from PIL import Image

from task_encoders.families import build_sample_encoder, model_options
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import media_kwargs
from task_encoders.packs.pack import Pack, SubSample, parse_json, sub_samples_of_pack
from task_encoders.sample_encoder import EncodedSample
from task_encoders.text.pieces import to_messages
from tests.helpers.layout_readers import (
    batches_by_key,
    is_turned,
    pack_by_command,
    pictures,
)
from tests.helpers.texts_and_images import random_sample
from tests.peers import Say

if not os.environ.get("LLAVA_ONEVISION_2"):
    pytest.skip("LLAVA_ONEVISION_2=DIR names no checkout of it", allow_module_level=True)
CHECKOUT = Path(os.environ["LLAVA_ONEVISION_2"]).resolve()
OWN_CODE = CHECKOUT / "transformers_impl/llavaonevision2"

VERSION = f"LLaVA-OneVision-2 on energon {version('megatron-energon')}"
FAMILY = "llava_onevision_2"
SEQ_LENGTH = 2048
#: Arguments, tokenizer and chat template, which its data code asks for.
_GIVEN: dict[str, Any] = {}


def install() -> None:
    """Make its data code importable: the packages around it import Megatron's trainer, and its
    copy of megatron-core calls the base of tokenizers otherwise."""
    megatron_tokenizer.MegatronTokenizer = megatron_tokenizer.MegatronLegacyTokenizer
    for part in ("", ".data", ".utils", ".tokenizer"):
        name = f"aiak_training_llm{part}"
        module = ModuleType(name)
        module.__path__ = [str(CHECKOUT / name.replace(".", "/"))]
        sys.modules[name] = module
    utils: Any = sys.modules["aiak_training_llm.utils"]
    utils.get_args = lambda: _GIVEN["args"]
    utils.get_tokenizer = lambda: _GIVEN["tokenizer"]
    utils.get_chat_template = lambda: _GIVEN["template"]


install()


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


def task_encoder(checkpoint: Path) -> Any:
    """Its own for a checkpoint, with the arguments of its quick start."""
    from aiak_training_llm.data.chat_templete import ChatTemplate
    from aiak_training_llm.data.multimodal.qwen2vl_task_encoder import Qwen2VLTaskEncoder
    from aiak_training_llm.tokenizer.tokenization_hf import AutoTokenizerFromHF

    _GIVEN["args"] = Namespace(
        training_phase="sft",
        hf_tokenizer_path=str(checkpoint),
        seq_length=SEQ_LENGTH,
        min_pixels=None,
        max_pixels=None,
        enable_discard_sample=False,
        packing_pretrain_data=False,
        packing_sft_data=False,
        length_sort_pool_size=0,
    )
    _GIVEN["tokenizer"] = AutoTokenizerFromHF(str(checkpoint), True, "right", 1 << 30, False)
    _GIVEN["template"] = ChatTemplate.from_name("qwen2-vl")
    return Qwen2VLTaskEncoder(_GIVEN["args"])


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


def batches(packed: Path, encoder: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and batch of each pack, as its `dataloader_provider.py` opens the loader."""
    from aiak_training_llm.data.multimodal.task_encoder import print_error_handler

    return batches_by_key(packed, encoder, print_error_handler)


@pytest.mark.parametrize(
    ("patch_size", "merge_size", "count"), [(14, 2, 350), (14, 3, 60), (16, 2, 60), (16, 3, 60)]
)
def test_every_batch_is_what_its_encoder_makes_of_the_pack(
    patch_size: int, merge_size: int, count: int, tmp_path: Path, say: Say
) -> None:
    sizes = {"patch_size": patch_size, "merge_size": merge_size, "max_pixels": 120_000}
    model = save_checkpoint(tmp_path / "checkpoint", **sizes)
    packed = pack(tmp_path, conversations(tmp_path / "source", count), model)
    ours = build_sample_encoder(model_options(**model))
    theirs = task_encoder(tmp_path / "checkpoint")
    packs = {raw.key: raw for raw in PackedFolder(packed)}
    counts = dict.fromkeys(("packs", "samples", "of several images", "images", "turned"), 0)
    for key, batch in batches(packed, theirs):
        raw = packs.pop(key)
        samples = sub_samples_of_pack(Pack(key, parse_json(raw.record, key), raw.media), "bmr")
        encoded = [ours.encode(one.sample, one.images) for one in samples]
        bounds = np.cumsum([0, *(len(one.tokens) for one in encoded)])
        assert batch["cu_lengths"].tolist() == [bounds.tolist()]
        for name in ("tokens", "labels"):
            (found,) = batch[name].tolist()
            assert found == np.concatenate([getattr(one, name) for one in encoded]).tolist(), key
        files = [data for one in samples for data in one.images]
        counts["turned"] += compare_images(files, encoded, batch)
        counts["packs"] += 1
        counts["samples"] += len(samples)
        counts["of several images"] += sum(len(one.images) > 1 for one in samples)
        counts["images"] += len(files)
    assert not packs
    assert counts["of several images"] > count * 0.8
    said = ", ".join(f"{n} {name}" for name, n in counts.items())
    say(f"p{patch_size}m{merge_size}: {said}: batches equal")


def compare_images(files: list[bytes], ours: list[EncodedSample], batch: dict[str, Any]) -> int:
    """Compare grids, patches and their positions of a row's images. It does not turn images upright
    by their EXIF; returns the number of these."""
    if not files:
        assert batch["image_grid_thw"] is None
        return 0
    grids = torch.from_numpy(np.concatenate([one.image_grid_thw for one in ours]))
    rows = torch.from_numpy(np.concatenate([one.pixel_values for one in ours]))
    found = media_kwargs(rows, grids, layout=ours[0].image_layout)
    theirs = batch | {"pixel_values": batch["imgs"]}
    turned = 0
    names = ("image_grid_thw", "pixel_values", "patch_positions")
    both = ([*pictures(*(one[name] for name in names))] for one in (found, theirs))
    for data, own, its in zip(files, *both, strict=True):
        if is_turned(Image.open(io.BytesIO(data))):
            assert sorted(own[0]) == sorted(its[0])
            turned += 1
        else:
            assert own[0] == its[0]
            assert all(map(torch.equal, own[1:], its[1:]))
    return turned


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
        record = parse_json(raw.record, raw.key)
        ours = sub_samples_of_pack(Pack(raw.key, record, raw.media), "bmr")
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
