"""Videos of a folder (`--real-data`): lengths, tokens, grids and pixels of every family equal those
of transformers' whole processor, which needs torchvision, on the frames that PyAV decodes."""

import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from task_encoders.families import build_sample_encoder
from task_encoders.media.video_file import read_video_header
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.samples import SampleError, SourceSample, Turn
from task_encoders.text.pieces import to_chat
from tests.helpers.encoder_contract import Pairs, unequal
from tests.helpers.hf_videos import WITH_PROCESSORS, processor_of
from tests.helpers.media_references import real_videos
from tests.helpers.tiny_checkpoints import packed_batch
from tests.helpers.tiny_families import save_tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="needs torchvision"
)
#: Names that InternVL's processor asks its tokenizer for.
_INTERNVL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def pixel_pairs(family: str, ours: Any, theirs: Any) -> Pairs:
    """Pixels, and the grids or places of their patches."""
    if family.startswith("gemma4"):
        pixels, places = ours["pixel_values_videos"], ours["video_position_ids"]
        num_patches = pixels.shape[1]
        own = theirs["pixel_values_videos"][:, :num_patches]
        counts = "num_frames_per_video"
        return {
            "pixels": (np.abs(pixels - own).max() <= 1e-7, True),  # see Gemma4Encoder
            "padding": (theirs["pixel_values_videos"][:, num_patches:].any(), False),
            "places": (places, theirs["video_position_ids"][:, :num_patches]),
            "frames": (ours[counts], theirs[counts]),
        }
    if family == "internvl3":
        return {"pixels": (ours["pixel_values"], theirs["pixel_values"])}
    ((steps, height, width),) = theirs["video_grid_thw"].tolist()
    if family.startswith("glm"):
        grids = [[1, height, width]] * steps
        pixels, found = ours["pixel_values"], ours["image_grid_thw"]
    else:
        grids = [[steps, height, width]]
        pixels, found = ours["pixel_values_videos"], ours["video_grid_thw"]
    return {"pixels": (pixels, theirs["pixel_values_videos"]), "grids": (found, grids)}


def differences(family: str, encoder: Any, processor: Any, path: Path) -> list[str]:
    """Names of what differs. Raises SampleError where the encoder sets the video aside."""
    data = path.read_bytes()
    header = read_video_header(io.BytesIO(data))
    sample = SourceSample("r", "vqa", (Turn("<video>What is it?", path.stem),), videos=("v",))
    encoded = encoder.encode(sample, [], [data])
    text = processor.apply_chat_template(to_chat(sample), tokenize=False).rstrip()
    options = {}
    if family.startswith("gemma4"):  # which takes a short video whole, and transformers refuses it
        options["num_frames"] = min(encoder.options.video_max_frames, header.num_frames)
    ending = "<|user|>" if family.startswith("glm") else ""
    theirs = processor(text=[text + ending], videos=[str(path)], return_tensors="pt", **options)
    measured = encoder.measure(sample, [], [header])
    seconds = encoder.sample_video(header).seconds_per_step
    pairs = {
        "tokens": (encoded.tokens, theirs["input_ids"][0]),
        "length": (measured.num_tokens, len(encoded.tokens)),
        "patches": (measured.num_vision_patches, measured_patches(encoded)),
        **pixel_pairs(family, to_transformers_kwargs(packed_batch([encoded])), theirs),
    }
    if "second_per_grid_ts" in theirs:
        pairs["seconds"] = (np.float32([seconds]), np.float32(theirs["second_per_grid_ts"]))
    return unequal(pairs)


def measured_patches(encoded: Any) -> int:
    """Patches of an encoded sample."""
    return len(encoded.image_pixels) + len(encoded.video_pixels)


@pytest.mark.parametrize("family", WITH_PROCESSORS)
def test_every_array_equals_transformers(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    videos = real_videos(request.config.getoption("--real-data"))
    save_tokenizer(family, tmp_path)
    names = {"extra_special_tokens": _INTERNVL} if family == "internvl3" else {}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, **names)
    encoder: Any = build_sample_encoder(family, str(tmp_path), resize="torch")
    processor = processor_of(family, encoder, tokenizer)
    wrong, compared = [], 0
    for path in videos:
        try:
            found = differences(family, encoder, processor, path)
        except SampleError:
            continue
        except IndexError as error:  # see media.video.sampled_frames
            assert re.fullmatch(r"frame (\d+) of \1", str(error))  # noqa: PT017
            continue
        compared += 1
        if found:
            wrong.append((path.name, found))
    assert wrong == []
    assert compared >= 0.9 * len(videos)
