"""VeOmni on packs, and against what its own transform and collator make of the same samples."""

from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from veomni.data import build_data_transform
from veomni.data.chat_template import build_chat_template
from veomni.data.data_collator import MainCollator
from veomni.distributed.parallel_state import init_parallel_state
from veomni.models.transformers.qwen2_vl.generated.patched_modeling_qwen2_vl_gpu import (
    Qwen2VLForConditionalGeneration,
)
from veomni.ops.kernels.cross_entropy import ForCausalLMLoss

from launch.loop.parallel import initialize_parallel
from offline_packing.demo.training import tiny_qwen2_vl
from task_encoders.families.builtin_processor import builtin_processor
from tests.helpers.hf_trainers import number_of, use_segment_attention
from tests.helpers.parity import check_losses
from tests.helpers.peers import (
    assert_same,
    check_order,
    check_uniform_steps,
    open_packs,
    stored_samples,
    two_losses,
)
from tests.helpers.veomni import make_loader, own_sample

Say = Callable[[str], None]
VERSION = f"VeOmni {version('veomni')}"


@pytest.fixture(autouse=True)
def _one_rank() -> None:
    initialize_parallel(1)  # its loader asks for the rank


@pytest.fixture(scope="module")
def family() -> str:
    return "qwen2_vl"


@pytest.fixture(scope="module")
def transform() -> Any:
    processor = builtin_processor(min_pixels=3136, max_pixels=100352)
    positions = Qwen2VLForConditionalGeneration.get_position_id_func(
        SimpleNamespace(config=tiny_qwen2_vl().config)
    )
    template = build_chat_template("qwen2vl", processor)
    return build_data_transform(
        "qwen2_vl", processor=processor, chat_template=template, position_id_func=positions
    )


def test_every_demo_pack_is_what_its_collator_makes_of_its_samples(
    task: str, demo: dict[str, Path], transform: Any, say: Say
) -> None:
    packs, collate = open_packs(demo[task]), MainCollator()
    loader = make_loader(demo[task])
    assert len(loader) == len(packs) > 5
    for pack, (ours,) in zip(packs, loader, strict=True):
        theirs = collate([own_sample(transform, *sample) for sample in stored_samples(pack)])
        assert ours.keys() == theirs.keys()
        assert_same(ours, theirs, f"{task} {pack.number}")
    say(f"{VERSION}: {len(packs)} packs of {task} are what its collator makes of their samples")


def initialize_ranks() -> None:
    """All are data parallel."""
    size = distributed.get_world_size()
    init_parallel_state(dp_size=size, dp_shard_size=size, device_type="cpu")


def numbers_read(packed: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    initialize_ranks()
    packs = open_packs(packed)
    return [number_of(with_media(row, packs), packs) for (row,) in make_loader(packed)]


def with_media(row: dict[str, Any], packs: Any) -> torch.Tensor:
    ids = packs.task_encoder.encoder.media_token_ids
    tokens: torch.Tensor = row["input_ids"].masked_fill(row["image_mask"], ids["image_token_id"])
    return tokens


def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    check_order(case[1], tmp_path, numbers_read)
    say(f"{VERSION}: order of packs kept on 1, 2 and 4 ranks")


def images_read(packed: Path) -> list[bool]:
    """Whether each row that this rank trains on has images."""
    initialize_ranks()
    return ["pixel_values" in row for (row,) in make_loader(packed)]


def test_uniform_steps(case: Any, family: str, tmp_path: Path, say: Say) -> None:
    counted = check_uniform_steps(family, case[0], tmp_path, images_read)
    say(f"{VERSION}: mixed steps of uniform packs: {counted}")


def test_its_loader_goes_on_where_it_was_saved(case: Any, say: Say) -> None:
    _, packed = case
    whole = list(make_loader(packed, accumulated=2))
    loader = make_loader(packed, accumulated=2)
    first = list(islice(loader, 3))
    resumed = make_loader(packed, accumulated=2)
    resumed.load_state_dict(loader.state_dict())
    rest = list(resumed)
    assert rest
    for step, (found, expected) in enumerate(zip([*first, *rest], whole, strict=True)):
        assert len(found) == len(expected) == 2
        for row, other in zip(found, expected, strict=True):
            assert_same(row, other, f"step {step}")
    say(f"{VERSION}: its loader, saved in the middle of an epoch, goes on exactly")


def test_steps_are_those_of_our_own_trainer(case: Any, tmp_path: Path, say: Say) -> None:
    """On VeOmni's own model and loss; its trainer needs a GPU."""
    checkpoint, packed = case
    model = Qwen2VLForConditionalGeneration.from_pretrained(checkpoint)
    use_segment_attention(model)
    model.loss_function = ForCausalLMLoss
    losses = two_losses(
        model, make_loader(packed), lambda rows: model(**rows[0], use_cache=False).loss
    )
    difference = check_losses(packed, checkpoint, losses, tmp_path / "ours")
    say(f"{VERSION}: loss before and after a step as launch.train's (to {difference:.0e})")
