"""Questions on the same pictures and videos, scattered over a data set, and packs that share them
as prefixes."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.datasets import WORDS, dialogue, image_bytes, write_json
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


def asked(root: Path) -> dict[str, Any]:
    """Dialogues on four pictures, some with another in the question; a few have none."""
    rng = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        (root / f"picture{number}.jpg").write_bytes(image_bytes(140 + 28 * number, 140))
    for i in range(80):
        first, *texts = (
            " ".join(rng.choice(WORDS, rng.integers(2, 12))) for _ in range(2 + 2 * (i % 2))
        )
        names = [f"picture{i % 4}.jpg"] if i % 11 else []
        more = [f"other{i}.jpg"] if names and i % 7 == 3 else []
        for name in more:
            (root / name).write_bytes(image_bytes(56, 84, shade=i))
        first = "<image>\n" * len(names) + first + " like <image>?" * len(more)
        content = {"messages": dialogue(first, *texts), "images": names + more}
        write_json(root / (f"q{i:03d}.json" if names else f"output_{i:08d}.json"), content)
    return {"format": "pairs", "path": str(root), "task": "bmr"}


def tree_folders(world: Any, **sections: dict[str, Any]) -> tuple[Path, Path]:
    """Return packs of a `World`, and packs of the same samples as trees, some in a val split."""
    output = {"packs_per_shard": 2, "split": {"val": 0.3, "train": 0.7}}
    plain, trees = (
        world.packed(asked, pack={"seq_length": 1024, **more}, output=output, **sections)
        for more in ({}, {"share_prefixes": True})
    )
    return plain, trees


def asked_briefly(root: Path) -> dict[str, Any]:
    """Write four dialogues on each of four pictures, and one without."""
    rng = np.random.default_rng(1)
    root.mkdir(parents=True)
    for number in range(4):
        (root / f"picture{number}.jpg").write_bytes(image_bytes(56 + 28 * number, 84))
    for i in range(17):
        question, answer = (" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(2))
        names = [f"picture{i % 4}.jpg"] if i else []
        turns = dialogue("<image>\n" * len(names) + question, f"{answer} {i}")
        write_json(root / f"q{i:02d}.json", {"messages": turns, "images": names})
    return {"format": "pairs", "path": str(root), "task": "bmr"}


def few_trees(world: Any, family: str) -> tuple[Path, Path, Path]:
    """Return a family's tiny checkpoint, and packs measured with it of few tokens: samples as
    trees, and the same samples whole."""
    from tests.helpers.tiny_families import encoder_options  # imports transformers' models

    checkpoint: Path = world.checkpoint(family)
    model = {"family": family, "processor": str(checkpoint), "max_pixels": None}
    model |= encoder_options(family)
    trees, whole = (
        world.packed(asked_briefly, model=model, pack={"seq_length": 512, **more})
        for more in ({"share_prefixes": True}, {})
    )
    return checkpoint, trees, whole
