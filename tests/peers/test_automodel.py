"""NeMo AutoModel on packs, and against what its own packing makes of the same samples."""

from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import AutoModelForImageTextToText, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from launch.trainers.automodel import PacksConfig
from offline_packing.demo.training import tiny_qwen2_vl
from task_encoders.families.builtin_processor import builtin_processor
from tests.helpers.automodel import (
    CAPTION_TEMPLATE,
    conversation,
    losses_of_packs,
    make_loader,
    own_batch,
    without_last_newline,
)
from tests.helpers.parity import check_losses
from tests.helpers.peers import (
    assert_same,
    check_order,
    check_uniform_steps,
    open_packs,
    stored_samples,
)

Say = Callable[[str], None]
VERSION = f"NeMo AutoModel {version('nemo-automodel')}"


@pytest.fixture(scope="module")
def loaded() -> Any:
    """A model with the whole vocabulary, and its processor."""
    builtin = builtin_processor()
    limits = {"min_pixels": 3136, "max_pixels": 100352}
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessorPil(**limits),
        builtin.tokenizer,
        Qwen2VLVideoProcessor(),
        chat_template=builtin.chat_template,
    )
    return tiny_qwen2_vl(), processor


def test_every_demo_pack_is_what_its_packing_would_give(
    task: str, demo: dict[str, Path], loaded: Any, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    model, processor = loaded
    options: dict[str, Any] = {"inject_fake_images": False}
    if task == "captioning":
        monkeypatch.setattr(processor, "chat_template", CAPTION_TEMPLATE)
    else:
        options["post_tokenize_hook"] = without_last_newline
    num_packs = 0
    for split in ("train", "val"):
        for pack, ours in zip(
            open_packs(demo[task], split), make_loader(demo[task], split), strict=True
        ):
            samples = [conversation(*sample) for sample in stored_samples(pack)]
            theirs = own_batch(samples, processor, model, **options)
            if task == "captioning":  # which it finds only between the headers of a dialogue
                assert (theirs.pop("labels") == -100).all()
                assert (ours["labels"] != -100).any()
            assert ours.keys() - {"labels"} == theirs.keys() - {"labels"}
            assert_same(ours, theirs, f"{task} {split} {pack.number}")
            num_packs += 1
    assert num_packs > 5
    say(f"{VERSION}: {num_packs} packs of {task} are what its own packing makes of their samples")


def numbers_read(packed: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    loader = make_loader(packed, rank=rank, world_size=world_size)
    return [pack_number(batch, packed) for batch in loader]


def pack_number(batch: dict[str, Any], packed: Path) -> int:
    packs = PacksConfig(str(packed)).build()
    tokens = batch["input_ids"][0]
    found = [i for i in range(len(packs)) if torch.equal(packs[i]["input_ids"], tokens)]
    assert len(found) == 1
    return found[0]


def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    check_order(case[1], tmp_path, numbers_read)
    say(f"{VERSION}: order of packs kept on 1, 2 and 4 ranks")


def images_read(packed: Path) -> list[bool]:
    """Whether each row that this rank trains on has images."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    loader = make_loader(packed, rank=rank, world_size=world_size)
    return [batch.get("pixel_values") is not None for batch in loader]


def test_uniform_steps(case: Any, family: str, tmp_path: Path, say: Say) -> None:
    counted = check_uniform_steps(family, case[0], tmp_path, images_read)
    say(f"{VERSION}: mixed steps of uniform packs: {counted}")


def test_its_loader_goes_on_where_it_was_saved(case: Any, say: Say) -> None:
    _, packed = case
    whole = list(make_loader(packed))
    loader: Any = make_loader(packed)
    first = list(islice(loader, 3))
    state = loader.state_dict()
    resumed: Any = make_loader(packed)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) > 3
    for number, (found, expected) in enumerate(zip([*first, *rest], whole, strict=True)):
        assert found.keys() == expected.keys()
        assert_same(found, expected, f"batch {number}")
    say(f"{VERSION}: its loader, saved in the middle of an epoch, goes on exactly")


def test_steps_are_those_of_our_own_trainer(case: Any, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = case
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="sdpa")
    losses = losses_of_packs(model, packed)
    difference = check_losses(packed, checkpoint, losses, tmp_path / "ours")
    say(f"{VERSION}: loss before and after a step as launch.train's (to {difference:.0e})")
