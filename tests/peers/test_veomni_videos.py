"""Packs with videos, against what VeOmni's own transform and collator make of the same samples."""

import io
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from veomni.data import build_data_transform
from veomni.data.chat_template import build_chat_template
from veomni.data.data_collator import MainCollator
from veomni.models.transformers.qwen2_5vl.generated import patched_modeling_qwen2_5_vl_gpu as vl_2_5
from veomni.models.transformers.qwen2_vl.generated import patched_modeling_qwen2_vl_gpu as vl_2

from launch.loop.parallel import initialize_parallel
from launch.model.config import config_of_preset
from task_encoders.families import build_sample_encoder
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.media.video_file import decode_frames, read_video_header
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS
from tests.helpers.peers import assert_same, open_packs, stored_samples
from tests.helpers.veomni import make_loader, own_sample
from tests.helpers.video_packs import MODEL, video_packs

Say = Callable[[str], None]
VERSION = f"VeOmni {version('veomni')}"
LIMITS = {"min_pixels": MODEL["min_pixels"], "max_pixels": MODEL["max_pixels"]}
#: Options of VeOmni's recipes, except for its own limits of pixels.
SAMPLING: dict[str, Any] = {"fps": 2.0, "frame_factor": 2, "min_frames": 4, "max_frames": 768}
MODELS = {
    "qwen2_vl": vl_2.Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": vl_2_5.Qwen2_5_VLForConditionalGeneration,
}
VISION: dict[str, dict[str, int]] = {"qwen2_vl": {}, "qwen2_5_vl": {"tokens_per_second": 2}}


@pytest.fixture(autouse=True)
def _one_rank() -> None:
    initialize_parallel(1)  # its loader asks for the rank


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
