"""Images: sizes without decoding, of JPEGs and PNGs without Pillow; orientation, transparency, and
what is refused; patches of both backends, as transformers' own backend has them."""

import functools
import io
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import AvifImagePlugin, Image, ImageOps, features
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from task_encoders.media import image
from task_encoders.media.image import decode_image, read_image_header, read_plain
from task_encoders.media.patches import BACKENDS
from task_encoders.samples import SampleError
from task_encoders.samples.limits import MAX_IMAGE_EXTRA, MAX_PIXEL_BYTES
from tests.helpers.datasets import png
from tests.helpers.encoder_contract import needs_transformers


def save(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def picture(width: int = 60, height: int = 40) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def header(data: bytes, **options: Any) -> image.ImageHeader:
    return read_image_header(io.BytesIO(data), **options)


def outcome(data: bytes, run: Callable[..., Any] = header, **options: Any) -> Any:
    """What is read, or the reason of the error."""
    try:
        return run(data, **options)
    except SampleError as error:
        return error.reason


#: In tables of formats: where the installed Pillow has it.
AVIF = ["AVIF"] * features.check("avif")


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", *AVIF])
def test_formats(image_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats whose end cannot be recognised are decoded to be measured; the common ones never."""
    exif = Image.Exif()
    for orientation in range(1, 9) if image_format not in ("GIF", "BMP") else ():
        exif[0x0112] = orientation
        data = save(picture(), image_format, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert header(data)[:2] == expected.size[::-1]
        np.testing.assert_array_equal(np.asarray(decode_image(data)), np.asarray(expected))
    data = save(picture(200, 160), image_format)
    for keep in (0.3, 0.6, 0.95) if image_format not in ("BMP", "TIFF") else ():
        assert outcome(data[: int(len(data) * keep)]) in ("truncated_image", "bad_image")
    decoded: list[Image.Image] = []
    monkeypatch.setattr(image, "_load", decoded.append)
    mode = "P" if image_format == "GIF" else "RGB"
    assert header(data) == image.ImageHeader(160, 200, image_format, mode)
    assert bool(decoded) == (image_format in ("BMP", "TIFF", "AVIF"))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


@functools.cache
def phone_files(**options: Any) -> dict[str, bytes]:
    """Pictures as phones write them: an MPF segment, second pictures, and other bytes after them.
    The end of the first picture of "short MPF" is not where its MPF segment says."""
    first, second = picture(200, 160), save(picture(), "JPEG")
    # The thumbnail has an end marker.
    thumbnail = {"exif": Image.Exif().tobytes() + save(picture(8, 8), "JPEG")}
    several = {"save_all": True, "append_images": [picture()], **options}
    stereo, plain = save(first, "MPO", **several), save(first, "JPEG", **options, **thumbnail)
    gain = save(first, "MPO", xmp=b'<rdf:Description hdrgm:Version="1.0"/>', **several)
    seconds = {"second": second, "clip": b"\0\0\0\x18ftypmp42" + bytes(500), "SEFT": b"SEFT" * 9}
    return {
        "MPF": stereo,
        "MPF, trailer": stereo + seconds["SEFT"],
        "MPF, gain map": gain,
        "MPF, gain map, clip": gain + seconds["clip"],
        "clip": plain + seconds["clip"],
        "second, trailer": plain + seconds["second"] + seconds["SEFT"],
        "short MPF": stereo[: stereo.rindex(_START)] + bytes(7) + second + seconds["SEFT"],
    }


_START = b"\xff\xd8\xff"


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("form", phone_files())
def test_pictures_of_phones_are_not_decoded(
    form: str, progressive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = phone_files(progressive=progressive)[form]
    assert decode_image(data).size == (200, 160)
    monkeypatch.delattr(image, "_load")
    for block in (23, 200, 1 << 18):  # segments, even their headers, and scans cross blocks
        monkeypatch.setattr(image, "_BLOCK", block)
        assert header(data)[:2] == (160, 200)


@pytest.mark.parametrize("form", phone_files())
def test_a_phones_picture_that_lost_its_end_is_found(form: str) -> None:
    data = phone_files()[form]
    end = data.index(b"\xff\xd9", 1000)
    for begin in (end // 2, end - 50, end):
        for cut in (data[:begin], data[:begin] + data[end + 2 :]):  # what follows it is there
            found = [outcome(cut, run) for run in (header, decode_image)]
            # A decoder takes a clip's bytes for the rest of the picture.
            taken = b"ftyp" in cut and not any(isinstance(one, str) for one in found)
            assert found == ["truncated_image"] * 2 or taken


@functools.cache
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
def test_transparency_is_composed_on_white_as_transformers_does(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_transformers("5.10", "has no convert_to_rgb for arrays")
    data = transparent_files()[kind]
    (tmp_path / "picture").write_bytes(data)
    ours = np.asarray(decode_image(data))
    opened = convert_to_rgb(Image.open(tmp_path / "picture"), return_numpy=True)
    np.testing.assert_array_equal(ours, opened)
    monkeypatch.setattr(image, "_BAND", 7)
    np.testing.assert_array_equal(np.asarray(decode_image(data)), ours)
    loaded = load_image(str(tmp_path / "picture"))
    same = np.array_equal(ours, convert_to_rgb(loaded, return_numpy=True))
    assert same == kind.endswith("key")  # alpha channels are gone by then, and what they hid shows
    shown = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert (ours != shown).any()


NO_IMAGES = [b"", b"\xff\xd8\xff", b"no image", b"<svg/>", b"%!PS-Adobe", b"\x89PNG\r\n\x1a\n"]
#: A text that is long when it is unpacked.
TEXT_BOMB = save(picture(), "PNG")[:33] + png_chunk(
    b"zTXt", b"Comment\0\0" + zlib.compress(bytes(9_000_000))
)
LONG = {
    "fill bytes": b"\xff\xd8" + b"\xff" * 50_000 + b"\xff\xd9",
    "segments": b"\xff\xd8" + b"\xff\xe5\0\2" * 50_000 + b"\xff\xd9",
    "chunks": save(picture(), "PNG")[:33] + png_chunk(b"abCd", b"") * 50_000,
    "comments": b"GIF89a" + bytes(7) + b"\x21\xfe" + b"\1c" * 50_000,
}


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        *(
            ("bad_image", data)
            for data in (*NO_IMAGES, bytes(600), png(3, 1, bytes(4))[:33] + TEXT_BOMB)
        ),
        *(pytest.param("too_costly", data, id=name) for name, data in LONG.items()),
    ],
)
def test_what_is_no_image_or_hides_it_is_refused(reason: str, data: bytes) -> None:
    assert outcome(data) == reason


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("AVIF", b"\0\0\0\x20ftypavif"),
        ("AVIF", b"\0\0\0\x20ftypavis"),
        ("HEIC", b"\0\0\0\x18ftypheic"),
        ("HEIC", b"\0\0\0\x18ftypmif1"),
        ("JPEG XL", b"\xff\x0a"),
        ("JPEG 2000", b"\0\0\0\x0cjP  \r\n\x87\n"),
        ("SVG", b"\xef\xbb\xbf<svg>"),
        ("SVG", b'<?xml version="1.0"?>\n<!-- a -->\n<svg'),
        ("", b"\0\0\0\x18ftypmp42"),
        ("", b"<html><body><svg"),
    ],
)
def test_pictures_of_other_formats_are_named(
    kind: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AVIF where Pillow is built without it."""
    monkeypatch.setattr(AvifImagePlugin, "SUPPORTED", False)
    problem = f"{kind} is not read; convert it" if kind else "cannot identify image file"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own
        with pytest.raises(SampleError, match=f"bad_image: {problem}"):
            header(data + bytes(99))


@pytest.mark.parametrize("run", [header, decode_image])
def test_too_many_pixels_are_refused_from_the_header(run: Any) -> None:
    """Fewer are allowed where a decoder needs more memory."""
    assert outcome(png(60_000, 60_000, b"", 2), run) == "image_too_large"
    for image_format, least in (("PNG", 2400), ("WEBP", 4800), ("JPEG", 3600)):
        data = save(picture(), image_format, **{"progressive": True} if least == 3600 else {})
        assert outcome(data, run, max_image_pixels=least - 1) == "image_too_large"
        assert not isinstance(outcome(data, run, max_image_pixels=least), str)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_files_that_are_mostly_something_else_are_refused(form: str) -> None:
    data, limit = save(picture(), form), MAX_IMAGE_EXTRA + MAX_PIXEL_BYTES * 60 * 40
    for more in (0, 1):
        long = data[:-12] + bytes(limit + more - len(data)) + data[-12:]
        assert (outcome(long) == "too_costly") == bool(more)


def test_scans_are_counted_where_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    data = save(picture(), "JPEG", progressive=True)
    for many in (data, save(picture(), "JPEG", progressive=True, comment=b"c" * 5000)):
        for scans in (10, 9):  # it has 10
            monkeypatch.setattr(image, "MAX_SCANNED_PIXELS", 60 * 40 * scans)
            assert (outcome(many) == "too_costly") == (scans == 9)


def jpeg(width: int = 37, height: int = 23, mode: str = "RGB", **options: object) -> bytes:
    rng = np.random.default_rng(width)
    image = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).convert(mode)
    return save(image, "JPEG", **options)


def with_segments(*segments: tuple[int, bytes]) -> bytes:
    """A JPEG with (marker, data) before its tables."""
    parts = [struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data for marker, data in segments]
    return b"\xff\xd8" + b"".join(parts) + jpeg()[2:]


def with_chunks(*chunks: tuple[bytes, bytes], late: bool = False, **options: object) -> bytes:
    """A PNG with chunks before or after its pixels."""
    data = save(picture(37, 23), "PNG", **options)
    place = len(data) - 12 if late else 33
    return data[:place] + b"".join(png_chunk(*chunk) for chunk in chunks) + data[place:]


def exif_of(orientation: int = 6, order: str = "<") -> bytes:
    """EXIF with a text of its own place, the orientation, and a resolution."""
    entries = [(0x010F, 2, 6, 80), (0x0112, 3, 1, orientation), (0x011A, 5, 1, 90)]
    entries += [(0x0128, 3, 1, 2)]
    data = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "LH", 8, len(entries))
    for tag, kind, count, value in entries:
        form = "HHLHxx" if kind == 3 else "HHLL"
        data += struct.pack(order + form, tag, kind, count, value)
    return data.ljust(80, b"\0") + b"Maker\0".ljust(10, b"\0") + struct.pack(order + "LL", 72, 1)


def raw_profile(exif: bytes) -> bytes:
    """As ImageMagick writes EXIF as text."""
    return b"\nexif\n%8d\n%s\n" % (len(exif), exif.hex().encode())


EXIF = b"Exif\0\0"
XMP = b'<rdf:Description tiff:Orientation="6"/>'
JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0"
PNG_XMP = b"XML:com.adobe.xmp\0"
PHOTOSHOP = b"Photoshop 3.0\x008BIM\x04\x04\0\0" + struct.pack(">I", 8) + bytes(8)
ADOBE = b"Adobe\0\x64\0\0\0\0\1"
#: Each has the orientation 6.
TURNED = {
    "exif": with_segments((0xE1, EXIF + exif_of())),
    "exif_of_big_end": with_segments((0xE1, EXIF + exif_of(order=">"))),
    "exif_twice_named": with_segments((0xE1, EXIF * 2 + exif_of())),
    "exif_in_two": with_segments((0xE1, EXIF + exif_of()[:60]), (0xE1, EXIF + exif_of()[60:])),
    "exif_of_pillow": jpeg(exif=EXIF + exif_of()),
    "exif_long": with_segments((0xE1, EXIF + exif_of() + bytes(20_000))),
    "xmp": with_segments((0xE1, JPEG_XMP + XMP)),
    "xmp_element": with_segments((0xE1, JPEG_XMP + b"<tiff:Orientation>6</tiff:Orientation>")),
    "xmp_last": with_segments((0xE1, JPEG_XMP + XMP.replace(b"6", b"1")), (0xE1, JPEG_XMP + XMP)),
    "xmp_long": with_segments((0xE1, JPEG_XMP + b" " * 30_000 + XMP)),
    "exif_before_xmp": with_segments(
        (0xE1, JPEG_XMP + XMP.replace(b"6", b"1")), (0xE1, EXIF + exif_of())
    ),
    "png_exif": with_chunks((b"eXIf", exif_of())),
    "png_exif_late": with_chunks((b"eXIf", exif_of()), (b"tIME", bytes(7)), late=True),
    "png_xmp": with_chunks((b"iTXt", PNG_XMP + b"\0\0\0\0" + XMP)),
    "png_xmp_packed": with_chunks((b"iTXt", PNG_XMP + b"\1\0\0\0" + zlib.compress(XMP))),
    "png_raw": with_chunks((b"tEXt", b"Raw profile type exif\0" + raw_profile(exif_of()))),
    "png_raw_packed": with_chunks(
        (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile(EXIF + exif_of())))
    ),
}
PLAIN = {
    "baseline": jpeg(),
    "progressive": jpeg(progressive=True),
    "grey": jpeg(mode="L"),
    "cmyk": jpeg(mode="CMYK"),
    "restart": jpeg(restart_marker_blocks=1),
    "comment": jpeg(comment=b"c" * 5000),
    "high_quality": jpeg(quality=100, subsampling=0),
    "icc": jpeg(icc_profile=b"p" * 600),
    "icc_in_many": jpeg(icc_profile=b"p" * 200_000),
    "editor": with_segments((0xED, PHOTOSHOP), (0xEE, ADOBE), (0xEC, b"Ducky\0\1\0\4\0\0\0")),
    "exif_of_orientation_0": with_segments((0xE1, EXIF + exif_of(0)), (0xE1, JPEG_XMP + XMP)),
    "other_app1": with_segments((0xE1, b"http://ns.adobe.com/xmp/extension/\0" + XMP)),
    "png_text": with_chunks((b"tEXt", b"Author\0me"), (b"zTXt", b"A\0\0" + zlib.compress(b"b"))),
    "png_icc": with_chunks(icc_profile=np.random.default_rng(0).bytes(3000)),
    "png_xmp_late": with_chunks((b"iTXt", PNG_XMP + b"\0\0\0\0" + XMP), late=True),
    "png_named_exif": with_chunks((b"tEXt", b"Comment\0eXIf"), late=True),
    **{f"png_{mode}": save(picture(37, 23).convert(mode), "PNG") for mode in ("1", "L", "P", "LA")},
    **{f"png_{mode}": save(picture(37, 23).convert(mode), "PNG") for mode in ("RGB", "RGBA")},
    "png_16_bits": save(Image.fromarray(np.arange(851, dtype=np.uint16).reshape(23, 37)), "PNG"),
    "png_key": save(picture(37, 23), "PNG", transparency=(1, 2, 3)),
}
NOT_PLAIN = {
    "multi_picture": save(
        picture(), "MPO", save_all=True, append_images=[picture()], exif=EXIF + exif_of()
    ),
    "exif_of_longs": with_segments((0xE1, EXIF + exif_of().replace(b"\x12\1\3\0", b"\x12\1\4\0"))),
    "resolution_of_bytes": with_segments(
        (0xE1, EXIF + exif_of().replace(b"\x1a\1\5\0", b"\x1a\1\1\0"))
    ),
    "broken_exif": jpeg(exif=EXIF + b"II*\0\xff\xff\xff\xff"),
    "short_resource": with_segments((0xED, PHOTOSHOP[:20])),
    "short_adobe": with_segments((0xEE, b"Adobe\0")),
    "short_icc": with_segments((0xE2, b"ICC_PROFILE\0\1")),
    "animation": save(picture(), "PNG", save_all=True, append_images=[picture(59, 39)]),
    "png_xmp_as_text": with_chunks((b"tEXt", PNG_XMP + XMP)),
    "png_named_progressive": with_chunks((b"tEXt", b"progressive\x001")),
    "png_bad_checksum": with_chunks((b"tEXt", b"Author\0me")).replace(b"me", b"us"),
    "webp": save(picture(), "WEBP"),
    "gif": save(picture(), "GIF"),
    "signature": b"\x89PNG\r\n\x1a\n",
    "empty": b"",
}


@pytest.mark.parametrize("name", [*TURNED, *PLAIN])
def test_plain_headers_are_as_pillow_reads_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (TURNED | PLAIN)[name]
    size = (23, 37) if name in PLAIN else (37, 23)
    with monkeypatch.context() as patched:
        patched.delattr(image, "_open")
        patched.delattr(image, "_load")
        found = header(data)
    assert found[:2] == size == decode_image(data).size[::-1]
    monkeypatch.setattr(image, "read_plain", lambda file: None)
    assert found == header(data)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_is_left_to_pillow(name: str) -> None:
    data = NOT_PLAIN[name]
    assert read_plain(io.BytesIO(data)) is None
    if name == "broken_exif":  # which is no reason to lose an image
        assert header(data)[:2] == decode_image(data).size[::-1]


def test_little_is_read_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[tuple[int, int]] = []

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            places.append((self.tell(), size or 0))
            return super().read(size)

    for name, num_reads in (("editor", 1), ("exif_long", 2), ("comment", 2), ("icc_in_many", 4)):
        places.clear()
        read_plain(Counted((TURNED | PLAIN)[name]))
        assert len(places) == num_reads, name
        assert places[0] == (0, 4096)
        assert sum(size for _, size in places) < 30_000


def mutated(count: int, seed: int) -> list[bytes]:
    """Files with up to three changes in their first bytes; the checksums of most PNGs are right."""
    rng = np.random.default_rng(seed)
    files = [
        data
        for name, data in (PLAIN | TURNED | NOT_PLAIN).items()
        # Pillow decodes the pixels to find late EXIF, and with it damage of the pixels.
        if 100 < len(data) < 40_000 and name not in ("png_exif_late", "png_named_exif")
    ]
    found = []
    for _ in range(count):
        data = bytearray(files[rng.integers(len(files))])
        for place in rng.integers(
            2, min(int(rng.choice([60, 700])), len(data)), rng.integers(1, 4)
        ):
            value = rng.choice(
                [0, 1, 3, 6, 8, 0xC0, 0xD9, 0xDA, 0xE1, 0xED, 0xFF, rng.integers(256)]
            )
            match rng.integers(10):
                case 0:
                    del data[place : place + rng.integers(1, 20)]
                case 1:
                    data[place:place] = rng.bytes(rng.integers(1, 20))
                case 2:
                    del data[max(50, rng.integers(len(data))) :]
                case _ if place < len(data):
                    data[place] = value
        at = 8
        while data.startswith(b"\x89PNG") and rng.integers(20) and at + 12 <= len(data):
            end = at + 8 + int.from_bytes(data[at : at + 4], "big")
            if end + 4 > len(data):
                break
            data[end : end + 4] = struct.pack(">I", zlib.crc32(data[at + 4 : end]))
            at = end + 4
        found.append(bytes(data))
    return found


@pytest.mark.filterwarnings("ignore:.*(EXIF|APNG|MPO)")
def test_damaged_heads_have_pillows_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = mutated(count := 300, seed=300)
    fast = [outcome(data) for data in damaged]
    num_plain = sum(read_plain(io.BytesIO(data)) is not None for data in damaged)
    assert count / 4 < num_plain < count * 3 / 4  # both ways were taken
    monkeypatch.setattr(image, "read_plain", lambda file: None)
    assert fast == [outcome(data) for data in damaged]


@pytest.mark.parametrize("longest", [9, 60, 500])
def test_pillows_bytes(longest: int) -> None:
    """Enlarged, shrunk and squeezed, tall and wide, of noise and of black and white, whose sums
    leave the range of a byte."""
    rng = np.random.default_rng(longest)
    resize, _ = BACKENDS["pil"]
    for number in range(60):
        height, width, new_height, new_width = (int(n) for n in rng.integers(1, longest, 4))
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels if number % 2 else (pixels > 127) * np.uint8(255))
        expected = np.asarray(image.resize((new_width, new_height), Image.Resampling.BICUBIC))
        resized = resize(image, new_height, new_width)
        np.testing.assert_array_equal(resized[..., :3], expected)
