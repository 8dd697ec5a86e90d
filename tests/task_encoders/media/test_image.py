"""Images: sizes without decoding, of JPEGs without Pillow; orientation, transparency, and what is
refused."""

import dataclasses
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from task_encoders.families import build_sample_encoder
from task_encoders.media import image
from task_encoders.media.image import decode_image, jpeg_size, read_image_header, smart_resize
from task_encoders.samples import SampleError
from task_encoders.samples.limits import MAX_IMAGE_EXTRA, MAX_PIXEL_BYTES
from tests.helpers.transformers_sources import needs_transformers

SETTINGS = build_sample_encoder(max_pixels=28 * 28 * 256).vision


def save(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def picture(width: int = 60, height: int = 40) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def header(data: bytes, **options: Any) -> image.ImageHeader:
    return read_image_header(io.BytesIO(data), **options)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_size_without_decoding(image_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = save(picture(), image_format)
    decoded = []
    monkeypatch.setattr(image, "_load", decoded.append)
    mode = "P" if image_format == "GIF" else "RGB"
    assert header(data) == image.ImageHeader(40, 60, image_format, mode)
    # Formats whose end cannot be recognised are decoded; the common ones never.
    assert bool(decoded) == (image_format in ("BMP", "TIFF"))


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_in_both_stages(image_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = save(picture(), image_format, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    found = header(data)
    assert (found.width, found.height) == expected.size
    np.testing.assert_array_equal(np.asarray(decode_image(data)), np.asarray(expected))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def test_exif_behind_a_pngs_pixels_is_found() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = save(picture(), "PNG")
    late = data[:-12] + png_chunk(b"eXIf", exif.tobytes()[6:]) + data[-12:]
    assert (header(late).width, header(late).height) == (40, 60)
    assert decode_image(late).size == (40, 60)


def test_broken_exif_is_no_reason_to_lose_an_image() -> None:
    data = save(picture(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert (header(data).width, header(data).height) == decode_image(data).size == (60, 40)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
def test_truncated_images_are_found_from_the_file_alone(image_format: str, keep: float) -> None:
    data = save(picture(200, 160), image_format)
    with pytest.raises(SampleError) as error:
        header(data[: int(len(data) * keep)])
    assert error.value.reason in ("truncated_image", "bad_image")


def test_bytes_behind_a_complete_image_do_no_harm() -> None:
    data = save(picture(), "JPEG") + b"\x00" * 100
    assert header(data).width == 60


def transparent_files() -> dict[str, bytes]:
    """Pictures with each kind of transparency; about a fifth of the pixels is hidden."""
    rng = np.random.default_rng(1)
    levels = rng.integers(0, 5, (40, 60), dtype=np.uint8)
    grey = Image.fromarray(levels)
    alpha = Image.fromarray(rng.choice([0, 90, 255], (40, 60)).astype(np.uint8))
    rgba, la = picture(), picture().convert("L")
    rgba.putalpha(alpha)
    la.putalpha(alpha)
    return {
        "L key": save(grey, "PNG", transparency=3),
        "RGB key": save(grey.convert("RGB"), "PNG", transparency=(3, 3, 3)),
        "P key": save(grey.convert("P"), "PNG", transparency=3),
        "1 key": save(Image.fromarray(levels > 2), "PNG", transparency=0),
        "GIF key": save(grey.convert("P"), "GIF", transparency=3),
        "P alphas": save(grey.convert("P"), "PNG", transparency=bytes([0, 90, 255, 30])),
        "LA": save(la, "PNG"),
        "RGBA": save(rgba, "PNG"),
        "WebP": save(rgba, "WEBP", lossless=True),
        "TIFF": save(rgba, "TIFF"),
    }


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("kind", transparent_files())
def test_transparency_is_composed_on_white_as_transformers_does(kind: str, tmp_path: Path) -> None:
    needs_transformers("5.10", "has no convert_to_rgb for arrays")
    data = transparent_files()[kind]
    (tmp_path / "picture").write_bytes(data)
    ours = np.asarray(decode_image(data))
    opened = convert_to_rgb(Image.open(tmp_path / "picture"), return_numpy=True)
    np.testing.assert_array_equal(ours, opened)
    loaded = load_image(str(tmp_path / "picture"))
    same = np.array_equal(ours, convert_to_rgb(loaded, return_numpy=True))
    assert same == kind.endswith("key")  # alpha channels are gone by then, and what they hid shows
    shown = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert (ours != shown).any()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff",
        b"no image",
        b"<svg/>",
        b"%!PS-Adobe",
        b"\x89PNG\r\n\x1a\n",
        b"\0" * 600,
    ],
)
def test_what_is_no_image_is_bad(data: bytes) -> None:
    with pytest.raises(SampleError) as error:
        header(data)
    assert error.value.reason == "bad_image"


def test_a_pixel_bomb_is_refused_from_its_header() -> None:
    ihdr = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", ihdr), (b"IDAT", b""), (b"IEND", b""))
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)
    for data, options in ((bomb, {}), (save(picture(), "PNG"), {"max_image_pixels": 2_000})):
        for run in (header, decode_image):
            with pytest.raises(SampleError) as error:
                run(data, **options)
            assert error.value.reason == "image_too_large"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff" * 50_000 + b"\xff\xd9",
        b"\xff\xd8" + b"\xff\xe5\0\2" * 50_000 + b"\xff\xd9",
        save(picture(), "PNG")[:33] + png_chunk(b"abCd", b"") * 50_000,
        b"GIF89a" + bytes(7) + b"\x21\xfe" + b"\1c" * 50_000,
    ],
    ids=["fill_bytes", "segments", "chunks", "comments"],
)
def test_headers_of_any_length_are_refused(data: bytes) -> None:
    with pytest.raises(SampleError, match="too_costly"):
        header(data)


def test_decoders_that_need_more_memory_have_fewer_pixels() -> None:
    for image_format, options in (("WEBP", {}), ("JPEG", {"progressive": True})):
        data = save(picture(60, 40), image_format, **options)
        assert header(data, max_image_pixels=4800).width == 60
        with pytest.raises(SampleError, match=r"60x40 pixels > max_image_pixels 3200 / "):
            header(data, max_image_pixels=3200)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_files_that_are_mostly_something_else_are_refused(form: str) -> None:
    data = save(picture(), form)
    limit = MAX_IMAGE_EXTRA + MAX_PIXEL_BYTES * 60 * 40
    end = data[-12:]
    most = data[:-12] + bytes(limit - len(data)) + end
    assert header(most).width == 60
    with pytest.raises(SampleError, match=f"too_costly: {limit + 1:,} bytes for 2,400 pixels"):
        header(data[:-12] + bytes(limit + 1 - len(data)) + end)


def test_scans_are_counted_where_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    data = save(picture(), "JPEG", progressive=True)
    for many in (data, save(picture(), "JPEG", progressive=True, comment=b"c" * 5000)):
        monkeypatch.setattr(image, "MAX_SCANNED_PIXELS", 60 * 40 * 10)
        assert header(many).width == 60  # it has 10
        monkeypatch.setattr(image, "MAX_SCANNED_PIXELS", 60 * 40 * 9)
        with pytest.raises(SampleError, match="too_costly: 10 scans"):
            header(many)


def test_bands_on_white_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    data = save(
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 4), "u1")), "PNG"
    )
    whole = decode_image(data)
    monkeypatch.setattr(image, "_BAND", 7)
    assert decode_image(data).tobytes() == whole.tobytes()


def test_a_text_bomb_is_refused() -> None:
    bomb = png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"0" * 200_000_000, 9))
    data = save(picture(), "PNG")
    with pytest.raises(SampleError) as error:
        header(data[:33] + bomb + data[33:])
    assert error.value.reason == "bad_image"


@pytest.mark.parametrize(("size", "fits"), [((2_000, 10), True), ((2_001, 10), False)])
def test_the_aspect_limit_itself_is_allowed(size: tuple[int, int], fits: bool) -> None:
    for height, width in (size, size[::-1]):
        if fits:
            smart_resize(height, width, SETTINGS)
        else:
            with pytest.raises(SampleError, match="200:1"):
                smart_resize(height, width, SETTINGS)


@pytest.mark.parametrize("limits", [(100, 10_000), (10_000, 5_000), (0, 784)])
def test_impossible_limits_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="min_pixels"):
        dataclasses.replace(SETTINGS, min_pixels=limits[0], max_pixels=limits[1])


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
