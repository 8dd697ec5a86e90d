"""VeOmni on packs, and against what its own transform and collator make of the same samples, with
images and with videos."""

import io
from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import distributed
from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from veomni.data import build_data_transform
from veomni.data.chat_template import build_chat_template
from veomni.data.data_collator import MainCollator
from veomni.distributed.parallel_state import init_parallel_state
from veomni.models.transformers.qwen2_5vl.generated import patched_modeling_qwen2_5_vl_gpu as vl_2_5
from veomni.models.transformers.qwen2_vl.generated import patched_modeling_qwen2_vl_gpu as vl_2
from veomni.models.transformers.qwen2_vl.generated.patched_modeling_qwen2_vl_gpu import (
    Qwen2VLForConditionalGeneration,
)
from veomni.ops.kernels.cross_entropy import ForCausalLMLoss

from launch.loop.parallel import initialize_parallel
from launch.model.config import config_of_preset
from offline_packing.demo.training import tiny_qwen2_vl
from task_encoders.families import build_sample_encoder
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.media.video_file import decode_frames, read_video_header
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS
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
from tests.helpers.video_packs import MODEL, video_packs

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


LIMITS = {"min_pixels": MODEL["min_pixels"], "max_pixels": MODEL["max_pixels"]}
#: Options of VeOmni's recipes, except for its own limits of pixels.
SAMPLING: dict[str, Any] = {"fps": 2.0, "frame_factor": 2, "min_frames": 4, "max_frames": 768}
MODELS = {
    "qwen2_vl": vl_2.Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": vl_2_5.Qwen2_5_VLForConditionalGeneration,
}
VISION: dict[str, dict[str, int]] = {"qwen2_vl": {}, "qwen2_5_vl": {"tokens_per_second": 2}}


def transform_of(family: str) -> Any:
    config = config_of_preset(family, "tiny", {}, VISION[family], **MEDIA_TOKEN_IDS)
    builtin = builtin_processor()
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(**LIMITS), builtin.tokenizer, Qwen2VLVideoProcessor(**LIMITS)
    )
    return build_data_transform(
        family,
        processor=processor,
        chat_template=build_chat_template("qwen2vl", processor),
        position_id_func=MODELS[family].get_position_id_func(SimpleNamespace(config=config)),
        **SAMPLING,
    )


def assert_same_pixels(ours: Any, theirs: Any, grids: torch.Tensor) -> None:
    """Equal where a frame keeps its size; it resizes frames as floats, which transformers does as
    bytes."""
    sizes = grids.prod(dim=1).tolist()
    parts = zip(grids.tolist(), ours.split(sizes), theirs.split(sizes), strict=True)
    for grid, one, other in parts:
        difference = float((one - other).abs().max())
        assert difference < 0.3
        assert (difference == 0) == (grid == [9, 6, 4])  # of the clip of 84 rows and 56 columns


@pytest.mark.parametrize("family", MODELS)
def test_packs_with_videos_are_what_its_collator_makes_of_their_samples(
    task: str, family: str, tmp_path: Path, say: Say
) -> None:
    packed = video_packs(task, tmp_path, family=family)
    encoder = build_sample_encoder(family, **MODEL)
    packs, collate, transform = open_packs(packed), MainCollator(), transform_of(family)

    def frames_of(data: bytes) -> list[Image.Image]:
        """Those that are in the pack: by itself it takes those of qwen-vl-utils."""
        header = read_video_header(io.BytesIO(data))
        sampled = encoder.sample_video(header)
        return list(decode_frames(data, header, sampled.frames))

    num_videos = other_positions = 0
    for pack, (ours,) in zip(packs, make_loader(packed), strict=True):
        stored = stored_samples(pack)
        theirs = collate([own_sample(transform, *sample, frames_of) for sample in stored])
        assert ours.keys() == theirs.keys()
        if "video_grid_thw" in ours:
            pixels = theirs.pop("pixel_values_videos")
            assert_same_pixels(ours["pixel_values_videos"], pixels, ours["video_grid_thw"])
            num_videos += len(ours["video_grid_thw"])
            if family == "qwen2_5_vl":  # every step takes a second for it
                other = theirs.pop("position_ids") != ours["position_ids"]
                other_positions += int(other.any())
        assert_same(ours, theirs, f"{task} {pack.number}")
    assert num_videos >= 12
    assert (other_positions > 0) == (family == "qwen2_5_vl")
    but = f" and the seconds in positions of {other_positions}" * (other_positions > 0)
    said = f"{len(packs)} {family} packs of {task} with {num_videos} videos"
    say(f"{VERSION}: {said} as its own, but for resized frames{but}")
