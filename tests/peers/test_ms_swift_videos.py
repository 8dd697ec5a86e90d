"""ms-swift on packs with videos, against what its own template makes of the same samples."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import swift
import torch
import torchvision
from swift.model import get_model_processor

from task_encoders.media.video_file import read_video_header
from tests.helpers.hf_videos import decoded_video, with_processor
from tests.helpers.ms_swift import make_template, own_sample, packs_of_plugin
from tests.helpers.peers import assert_same, open_packs, stored_samples

Say = Callable[[str], None]
VERSION = f"ms-swift {swift.__version__}"
#: In pixel values.
THREE_OF_255 = 3.01 / 255 / 0.2613


@pytest.fixture
def _decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that it calls, which torchvision no longer has."""

    def read_video(path: str, **_: Any) -> tuple[torch.Tensor, None, dict[str, float]]:
        frames, rate = decoded_video(path)
        return torch.from_numpy(frames.transpose(0, 3, 1, 2)), None, {"video_fps": rate}

    monkeypatch.setattr(torchvision.io, "read_video", read_video, raising=False)


def same_frames(encoder: Any, data: bytes) -> bool:
    """Return True if ms-swift takes the frames of packs, which are transformers'."""
    header = read_video_header(io.BytesIO(data))
    frames = list(encoder.sample_video(header).frames)
    spread = torch.linspace(0, header.num_frames - 1, len(frames)).round().long()
    return frames == spread.tolist()


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def loaded(family: str, case: Any) -> Any:
    """The model and its processor, as ms-swift loads them."""
    return get_model_processor(str(with_processor(case[0])), model_type=family)


@pytest.mark.usefixtures("_decoder")
def test_packs_with_videos_are_what_its_packing_would_give(
    family: str, loaded: Any, video_packs: Path, tmp_path: Path, say: Say
) -> None:
    """All but the pixels: it resizes images with Pillow (those are compared with the demo's packs),
    and frames in floating point, which it spreads from the first to the last."""
    packs = open_packs(video_packs)
    encoder = packs.task_encoder.encoder
    stored = encoder.options.model_dump()
    limits = {f"{end}_pixels": stored[f"video_{end}_pixels"] for end in ("min", "max")}
    template, plugged = (make_template(*loaded, family) for _ in range(2))
    dataset = packs_of_plugin(plugged, loaded[0].model_dir, video_packs)
    alike = others = 0
    for number, pack in enumerate(packs):
        samples = list(stored_samples(pack))
        own = [own_sample(template, *s, limits, tmp_path) for s in samples]
        theirs = template.data_collator([own])
        ours = plugged.data_collator([dataset[number]])
        theirs.pop("second_per_grid_ts", None)  # of which positions were made
        assert ours.keys() == theirs.keys()
        pixels = [batch.pop("pixel_values_videos", None) for batch in (theirs, ours)]
        for batch in (theirs, ours):
            batch.pop("pixel_values", None)
        assert_same(ours, theirs, f"{family} {number}")
        videos = [data for sample, media in samples for data in media[len(sample.images) :]]
        if not videos:
            continue
        sizes = ours["video_grid_thw"].prod(1).tolist()
        for data, one, other in zip(videos, *(p.split(sizes) for p in pixels), strict=True):
            same = same_frames(encoder, data)
            difference = float((one - other).abs().max())
            assert difference < THREE_OF_255 if same else difference > 1
            alike, others = alike + same, others + (not same)
    assert alike > 3
    assert others > 3
    say(
        f"{VERSION}, {family}: {len(packs)} packs with {alike + others} videos are what its own "
        f"packing makes of their samples, but for the pixels: of {others} it takes other frames"
    )


def test_samples_padded_for_context_parallelism_go_on_behind(
    family: str, loaded: Any, video_packs: Path
) -> None:
    """As in its `_handle_megatron_cp`, which makes a sample longer and leaves its positions."""
    template, plugged = (make_template(*loaded, family) for _ in range(2))
    for sample in packs_of_plugin(plugged, loaded[0].model_dir, video_packs)[0]:
        del sample["labels"], sample["length"]
        sample["input_ids"] = torch.tensor([[*sample["input_ids"], 0, 0, 0]])
        types = torch.nn.functional.pad(sample["mm_token_type_ids"], (0, 3))
        sample["mm_token_type_ids"] = types[None]
        ours = plugged._get_position_ids(sample)["position_ids"]
        if family == "qwen2_vl" or "video_grid_thw" not in sample:  # which have no time
            theirs = template._get_position_ids(sample)["position_ids"]
            assert torch.equal(ours, theirs)
        assert torch.equal(ours[:, :, -4:].diff(), torch.ones(4, 1, 3, dtype=torch.int64))
