"""Tests in the environments of other trainers; some of these have torchvision."""

import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image, ImageOps

import tests.helpers.torchvision_stub
from task_encoders.samples import SourceSample
from task_encoders.text.pieces import to_chat

#: The fixture `say`.
Say = Callable[[str], None]


def chat_of(sample: SourceSample, media: Sequence[bytes]) -> list[dict[str, Any]]:
    """Messages of a sample, whose contents are lists of parts, a caption after its media. Images
    are upright, as frameworks do not turn them by their EXIF orientation; videos are bytes."""
    count, chat = len(sample.images), to_chat(sample)
    if sample.task == "captioning":
        parts = [{"type": "image"}] * count + [{"type": "video"}] * (len(media) - count)
        caption = {"type": "text", "text": sample.turns[0].answer}
        chat = [{"role": "assistant", "content": [*parts, caption]}]
    images = (ImageOps.exif_transpose(Image.open(io.BytesIO(data))) for data in media[:count])
    left = {"image": images, "video": iter(media[count:])}
    for message in chat:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        message["content"] = [
            {**part, kind: next(left[kind])} if (kind := part["type"]) in left else part
            for part in message["content"]
        ]
    return chat


def check_loader_resumes(make: Callable[[], Any]) -> str:
    """A loader that was saved in the middle of an epoch goes on exactly. Returns a sentence."""
    from tests.helpers.peers import assert_same  # not in every environment

    loader, resumed = make(), make()
    first = list(islice(loader, 3))
    resumed.load_state_dict(loader.state_dict())
    rest, whole = list(resumed), list(make())
    assert rest
    for step, (found, expected) in enumerate(zip([*first, *rest], whole, strict=True)):
        rows = (batch if isinstance(batch, list) else [batch] for batch in (found, expected))
        for row, other in zip(*rows, strict=True):
            assert row.keys() == other.keys()
            assert_same(row, other, f"step {step}")
    return "its loader, saved in the middle of an epoch, goes on exactly"


if Path(sys.prefix).name == "megatron_bridge":
    import tests.helpers.megatron_bridge_stubs  # noqa: F401
if Path(sys.prefix).name == "llama_factory":
    # There is no build of torchaudio for PyTorch's CPU wheel; only audio would need it.
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)  # for transformers
    os.environ["DISABLE_VERSION_CHECK"] = "1"  # as docs/integrations.md says
if Path(sys.prefix).name in ("automodel", "llama_factory", "ms_swift", "veomni"):
    from tests.helpers import stand_in_fla

    stand_in_fla.install()
