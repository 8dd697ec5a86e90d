"""Seeded random texts, images and conversations for the proofs of parity."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from task_encoders.samples import IMAGE_PLACEHOLDER, SourceSample, Turn
from tests.helpers.videos import make_video

ENGLISH = """the a red blue circle left of chart shows 3.14 1,280 values, rising; it's don't I'll
WE'RE picture. Why? (no) "quoted" x=y+1 https://a.b/c?d=e snake_case CamelCase""".split()
CHINESE = (
    "图片 中 有 三个 红色的圆形 , 左边 是 蓝色方块 。 价格 为 ¥1,280 吗 描述 这张 表格".split()
)
OTHER = (
    "naïve cafe\u0301 Ωmega 한국어 русский العربية 🙂 👩\u200d👩\u200d👧 [1] ½ ﬁ e\u0301\u0323"
).split()
JOINTS = (" ", " ", " ", "", "  ", "\n", "\n\n", ", ", "\r\n", "\t")


def random_text(rng: np.random.Generator, words: int, *, chinese: bool = False) -> str:
    """Words and joints that stress pre-tokenisation: newlines, spaces, digits, combining marks."""
    pools = [CHINESE] * 3 + [OTHER] if chinese else [ENGLISH] * 3 + [OTHER]
    parts = []
    for _ in range(words):
        pool = pools[rng.integers(len(pools))]
        parts += [pool[rng.integers(len(pool))], JOINTS[rng.integers(len(JOINTS))]]
    text = "".join(parts)
    return text if text.strip() else "x" + text


def random_image(
    rng: np.random.Generator, width: int, height: int, *, orientation: int | None = None
) -> bytes:
    """A JPEG or PNG file; modes other than RGB occur. `orientation` writes an EXIF tag (JPEG)."""
    coarse = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.save(buffer, "JPEG", quality=90, exif=exif)
    elif rng.random() < 0.5:
        mode = ("RGB", "RGB", "L", "RGBA", "P", "LA", "1")[rng.integers(7)]
        image.convert(mode).save(buffer, "PNG", compress_level=1)
    else:
        image.convert(("RGB", "L", "CMYK")[rng.integers(3)]).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def random_side(rng: np.random.Generator, low: int = 28, high: int = 420) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high))))


KINDS = ("one_image", "multi_image", "text_only", "chinese", "exif", "tiny", "extreme_aspect")


def random_sample(
    rng: np.random.Generator, kind: str, index: int, folder: Path
) -> tuple[SourceSample, list[bytes]]:
    """A conversation of one kind and its image files, which also lie in `folder` by name."""
    num_images = {"multi_image": int(rng.integers(2, 5)), "text_only": 0}.get(kind, 1)
    files = []
    for _ in range(num_images):
        width, height = random_side(rng), random_side(rng)
        if kind == "tiny":
            width, height = int(rng.integers(1, 12)), int(rng.integers(1, 12))
        elif kind == "extreme_aspect":
            width, height = int(rng.integers(3, 8)), int(rng.integers(300, 590))
            width, height = (width, height) if rng.random() < 0.5 else (height, width)
        orientation = int(rng.integers(1, 9)) if kind == "exif" else None
        files.append(random_image(rng, width, height, orientation=orientation))
    names = tuple(f"{kind}_{index}_{i}.bin" for i in range(num_images))
    for name, data in zip(names, files, strict=True):
        (folder / name).write_bytes(data)
    return SourceSample(f"{kind}/{index}", "bmr", random_turns(rng, kind, num_images), names), files


def random_turns(rng: np.random.Generator, kind: str, num_images: int) -> tuple[Turn, ...]:
    """A conversation about so many images."""
    chinese = kind == "chinese" or rng.random() < 0.2
    turns = []
    in_front = rng.random() < 0.3  # no placeholder at all: images go in front
    remaining = 0 if in_front else num_images
    for i in range(num_turns := int(rng.integers(1, 5))):
        here = remaining if i == num_turns - 1 else int(rng.integers(0, remaining + 1))
        remaining -= here
        prompt = random_text(rng, int(rng.integers(1, 20)), chinese=chinese)
        for _ in range(here):
            cut = int(rng.integers(0, len(prompt) + 1))
            if IMAGE_PLACEHOLDER in prompt:
                cut = 0  # never inside another placeholder
            prompt = prompt[:cut] + IMAGE_PLACEHOLDER + prompt[cut:]
        answer = random_text(rng, int(rng.integers(1, 30)), chinese=chinese)
        newlines = "\n" * int(rng.integers(0, 3))  # these merge into the header's newline
        turns.append(Turn(prompt, newlines + answer))
    return tuple(turns)


def random_documents(
    count: int, *, takes_videos: bool
) -> list[tuple[SourceSample, list[bytes], list[bytes]]]:
    """Random documents, their images and videos; each fourth has its images in front."""
    rng, clip = np.random.default_rng(1), make_video(12, 4)
    files = [random_image(rng, 60 + 10 * i, 100 - 10 * i) for i in range(4)]
    found = []
    for number in range(count):
        marks = ["<image>"] * int(rng.integers(4))
        if takes_videos and number % 5 == 0:
            marks.append("<video>")
        text = random_text(rng, 4) if number % 2 else ""
        for mark in rng.permutation(marks):
            text += mark + (random_text(rng, 6) if rng.random() < 0.8 else "")
        text += random_text(rng, 2) * (not text.strip() or rng.random() < 0.7)
        if number % 4 == 3:
            text = text.replace("<image>", "")
        if not text.replace("<image>", "").replace("<video>", "").strip():
            text += "x"
        images = [files[i] for i in rng.integers(0, 4, marks.count("<image>"))]
        names = tuple(f"{i}.png" for i in range(len(images)))
        videos = ("v.mp4",) * marks.count("<video>")
        sample = SourceSample(str(number), "captioning", (Turn("", text),), names, None, videos)
        found.append((sample, images, [clip] * len(videos)))
    return found
