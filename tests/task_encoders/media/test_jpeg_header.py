"""The size of a plain JPEG without Pillow: Pillow's answer or none, whatever the bytes."""

import io

import numpy as np
import pytest
from PIL import Image

from task_encoders.media import image
from task_encoders.media.image import jpeg_size, read_image_header
from task_encoders.samples import SampleError


def jpeg(width: int = 37, height: int = 23, mode: str = "RGB", **options: object) -> bytes:
    rng = np.random.default_rng(width)
    image = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def outcome(data: bytes) -> object:
    """Height, width and format, or the reason."""
    try:
        return read_image_header(io.BytesIO(data))[:3]
    except SampleError as error:
        return error.reason


PLAIN = {
    "baseline": jpeg(),
    "progressive": jpeg(progressive=True),
    "grey": jpeg(mode="L"),
    "restart": jpeg(restart_marker_blocks=1),
    "comment": jpeg(comment=b"a comment"),
    "colour_profile": jpeg(icc_profile=b"p" * 600),
    "high_quality": jpeg(quality=100, subsampling=0),
}
exif = Image.Exif()
exif[0x0112] = 6
NOT_PLAIN = {
    "exif": jpeg(exif=exif),
    "cmyk": jpeg(mode="CMYK"),
    "long_head": jpeg(comment=b"c" * 5000),
    "png": b"\x89PNG\r\n\x1a\n",
    "empty": b"",
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_jpegs_are_sized_as_pillow_does(name: str) -> None:
    with Image.open(io.BytesIO(PLAIN[name])) as image:
        size = (image.height, image.width)
        progressive = "progressive" in image.info
    assert jpeg_size(PLAIN[name]) == (*size, progressive) == (23, 37, name == "progressive")


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_is_left_to_pillow(name: str) -> None:
    assert jpeg_size(NOT_PLAIN[name][:4096]) is None


def test_damaged_heads_have_pillows_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    damaged = []
    for data in PLAIN.values():
        for _ in range(150):
            changed = bytearray(data)
            for place in rng.integers(2, min(700, len(data)), rng.integers(1, 4)):
                changed[place] = rng.choice([0, 1, 8, 0xC0, 0xD9, 0xDA, 0xFF, rng.integers(256)])
            damaged.append(bytes(changed))
    fast = [outcome(data) for data in damaged]
    sized = sum(jpeg_size(data) is not None for data in damaged)
    assert 100 < sized < len(damaged)  # both ways were taken
    monkeypatch.setattr(image, "jpeg_size", lambda head: None)
    assert fast == [outcome(data) for data in damaged]
