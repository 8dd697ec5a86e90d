"""Packs with videos, against what NeMo AutoModel's own packing makes of the same samples."""

import io
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from launch.model.config import config_of_preset, transformers_classes
from task_encoders.families import build_sample_encoder
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.media.video_file import read_video_header
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS
from tests.helpers.automodel import (
    CAPTION_TEMPLATE,
    conversation,
    make_loader,
    own_batch,
    without_last_newline,
)
from tests.helpers.peers import assert_same, open_packs, stored_samples
from tests.helpers.video_packs import MODEL, video_packs

Say = Callable[[str], None]
VERSION = f"NeMo AutoModel {version('nemo-automodel')}"
LIMITS = {"min_pixels": MODEL["min_pixels"], "max_pixels": MODEL["max_pixels"]}
PROCESSORS = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}
VISION: dict[str, dict[str, int]] = {"qwen2_vl": {}, "qwen2_5_vl": {"tokens_per_second": 2}}


def processor_of(family: str, task: str) -> Any:
    builtin = builtin_processor()
    template = CAPTION_TEMPLATE if task == "captioning" else builtin.chat_template
    videos = Qwen2VLVideoProcessor(fps=2.0, cap_pixels_per_frame=False, **LIMITS)
    return PROCESSORS[family](
        Qwen2VLImageProcessor(**LIMITS), builtin.tokenizer, videos, chat_template=template
    )


def compared(family: str, task: str, root: Path) -> Iterator[tuple[Any, Any]]:
    """Our batches and AutoModel's. It is told which frames to take: by itself it takes those of
    qwen-vl-utils."""
    packed = video_packs(task, root, family=family)
    config = config_of_preset(family, "tiny", {}, VISION[family], **MEDIA_TOKEN_IDS)
    model = transformers_classes(family).model(config)
    processor, packs = processor_of(family, task), open_packs(packed)
    encoder = build_sample_encoder(family, **MODEL)

    def as_video(data: bytes) -> dict[str, Any]:
        file = root / f"{hash(data)}.mp4"
        file.write_bytes(data)
        frames = encoder.sample_video(read_video_header(io.BytesIO(data))).frames
        return {"type": "video", "video": str(file), "frame_indices": list(frames)}

    hook = None if task == "captioning" else without_last_newline
    for pack, ours in zip(packs, make_loader(packed), strict=True):
        samples = [conversation(*stored, as_video) for stored in stored_samples(pack)]
        options = {"inject_fake_images": False, "post_tokenize_hook": hook}
        yield ours, own_batch(samples, processor, model, **options)


@pytest.mark.parametrize("family", PROCESSORS)
def test_packs_with_videos_are_what_its_packing_would_give(
    task: str, family: str, tmp_path: Path, say: Say
) -> None:
    num_videos = other_positions = num_packs = 0
    for ours, theirs in compared(family, task, tmp_path):
        if task == "captioning":  # which it finds only between the headers of a dialogue
            assert (theirs.pop("labels") == -100).all()
        if family == "qwen2_5_vl":
            # It counts seconds as if every frame of the file had been taken.
            seconds = theirs.pop("second_per_grid_ts", torch.empty(0))
            assert {round(2 / float(step)) for step in seconds} <= {10, 3}  # frames per second
            other = theirs.pop("position_ids") != ours["position_ids"]
            other_positions += int(other.any())
            assert not other.any() or "video_grid_thw" in ours
        assert ours.keys() - theirs.keys() <= {"labels", "position_ids"}
        assert_same(ours, theirs, f"{task} {num_packs}")
        num_videos += len(ours.get("video_grid_thw", ()))
        num_packs += 1
    assert num_videos >= 12
    assert (other_positions > 0) == (family == "qwen2_5_vl")
    but = f", but for the seconds in positions of {other_positions}" * (other_positions > 0)
    say(f"{VERSION}: {num_packs} {family} packs of {task} with {num_videos} videos as its own{but}")
