"""VeOmni's own rows of samples, and its loader of packs."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps
from torch import distributed
from veomni.data import build_dataloader, build_dataset
from veomni.data.multimodal.preprocess import PREPROCESSOR_REGISTRY

import launch.trainers.veomni  # noqa: F401
from task_encoders.samples import SourceSample
from task_encoders.text.pieces import to_chat

START, END = 151644, 151645


def make_loader(packed: Path, accumulated: int = 1, **options: Any) -> Any:
    """Packs through VeOmni's loader, as its trainer makes it."""
    dataset = build_dataset("mapping", train_path=str(packed), transform=None, seed=1)
    world_size = distributed.get_world_size() if distributed.is_initialized() else 1
    return build_dataloader(
        "native",
        dataset=dataset,
        micro_batch_size=1,
        global_batch_size=accumulated * world_size,
        dataloader_batch_size=accumulated,
        max_seq_len=0,
        train_steps=0,
        num_workers=0,
        prefetch_factor=None,
        pin_memory=False,
        **{"dyn_bsz": False, **options},
    )


@PREPROCESSOR_REGISTRY.register("messages")
def _messages(conversations: Any, **_: Any) -> Any:
    """Chats with parts, as VeOmni's templates take them."""
    return conversations


def png(data: bytes) -> bytes:
    """Upright: VeOmni does not turn images by their EXIF orientation. RGB: PNG has no CMYK."""
    file = io.BytesIO()
    ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB").save(file, "PNG")
    return file.getvalue()


def own_sample(
    transform: Any,
    sample: SourceSample,
    media: list[bytes],
    frames_of: Callable[[bytes], list[Image.Image]] | None = None,
) -> dict[str, Any]:
    """A sample as VeOmni encodes it, in the form of its template's own trainers. `frames_of` are
    those of a video that are given to it."""
    count = len(sample.images)
    videos = [frames_of(data) for data in media[count:] if frames_of]
    if sample.task == "captioning":
        front = [("image", None)] * count + [("video", None)] * len(videos)
        chat: list[Any] = [["assistant", *front, ("text", sample.turns[0].answer)]]
    else:
        chat = [
            [message["role"], *parts(message["content"])]
            for message in to_chat(sample)
            if message["role"] != "system"  # its template has one, the same for all samples
        ]
    template = transform.keywords["chat_template"]
    template.system_prompt = (
        type(template).system_prompt if sample.system is None else sample.system
    )
    images = [png(data) for data in media[:count]]
    (made,) = transform(
        {"conversations": chat, "images": images, "videos": videos, "source": "messages"}
    )
    tokens, labels = made["input_ids"], made["labels"]
    # It trains the newline after every answer, and keeps the last.
    labels[tokens.roll(1) == END] = -100
    first = 0
    end = len(tokens) - 1
    if sample.task == "captioning":  # it has headers round captions
        first = int((tokens == START).nonzero()[1]) + 3
        vision = made["image_mask"] | made["video_mask"]
        labels[vision.roll(-1) | vision | vision.roll(1)] = -100
    for name in ("input_ids", "attention_mask", "labels", "image_mask", "video_mask"):
        made[name] = made[name][first:end]
    made["position_ids"] = made["position_ids"][..., first:end] - first
    made.pop("mm_token_type_ids")  # not concatenated by its collator
    made["labels"][0] = -100
    return made


def parts(content: Any) -> list[tuple[str, Any]]:
    if isinstance(content, str):
        return [("text", content)]
    return [(part["type"], part.get("text")) for part in content]
