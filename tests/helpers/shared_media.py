"""Questions on the same pictures and videos, scattered over a data set."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.datasets import WORDS, dialogue
from tests.helpers.videos import make_video

#: Limits that leave videos of a few hundred tokens.
MODEL: dict[str, Any] = {"min_pixels": 784, "max_pixels": 28 * 28 * 64, "resize": "torch"}
MODEL |= {"video_min_pixels": 784, "video_max_pixels": 28 * 28 * 12}


def photo(seed: int, width: int, height: int) -> bytes:
    """A JPEG of blurred noise, with about the bytes of a photograph of its size."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
    pixels = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    pixels = pixels + rng.integers(-12, 13, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def shared_media(
    root: Path,
    questions: tuple[int, int, int] = (60, 10, 6),
    media: tuple[int, int] = (12, 2),
    *,
    captions: bool = False,
    sides: Sequence[int] = (56, 84, 112, 168, 224),
) -> dict[str, Any]:
    """Write samples in random order, and return their source.

    Args:
        questions: samples on a picture, on a video, and of text alone.
        media: pictures and videos.
        captions: a caption in place of each question.
        sides: sides of the pictures in pixels.
    """
    rng = np.random.default_rng(0)
    root.mkdir(parents=True)
    for number in range(media[0]):
        size = (int(rng.choice(sides)), int(rng.choice(sides)))
        (root / f"{number}.jpg").write_bytes(photo(number, *size))
    for number in range(media[1]):
        (root / f"{number}.mp4").write_bytes(make_video(12 + 8 * number, 10, 84, 56, tint=number))
    records: list[dict[str, Any]] = []
    for kind, count in enumerate(questions):
        for number in range(count):
            names: dict[str, list[str]] = {"images": [], "videos": []}
            if kind < 2:
                # each medium at least once, the first ones more often than others
                chosen = number
                if number >= media[kind]:
                    chosen = int(rng.geometric(min(1.5 / media[kind], 1.0))) - 1
                name = f"{chosen % media[kind]}.{('jpg', 'mp4')[kind]}"
                names["images" if kind == 0 else "videos"] = [name]
            said, asked = (" ".join(rng.choice(WORDS, rng.integers(2, 15))) for _ in range(2))
            mark = ("<image>\n", "<video>\n", "")[kind]
            content = dialogue(f"{mark}Where is {asked}?", said)
            own: dict[str, Any] = {"caption": said} if captions else {"messages": content}
            records.append({"id": f"{kind}-{number}", **own, **names})
    path = root / "questions.jsonl"
    path.write_text("".join(json.dumps(records[i]) + "\n" for i in rng.permutation(len(records))))
    task = "captioning" if captions else "vqa"
    return {"format": "jsonl", "path": str(path), "task": task}
