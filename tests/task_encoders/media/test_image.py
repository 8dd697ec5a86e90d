"""Images: sizes without decoding, of JPEGs and PNGs without Pillow; orientation, transparency, and
what is refused; patches of both backends, as transformers' own backend has them."""

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import AvifImagePlugin, Image, ImageOps, features
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from task_encoders.families import build_sample_encoder, model_options
from task_encoders.media import image
from task_encoders.media.image import decode_image, read_image_header, read_plain, smart_resize
from task_encoders.media.patches import BACKENDS, frame_patches, interleaved_patches
from task_encoders.samples import SampleError
from task_encoders.samples.limits import MAX_IMAGE_EXTRA, MAX_PIXEL_BYTES
from tests.helpers.encoder_contract import needs_transformers

SETTINGS = build_sample_encoder(max_pixels=28 * 28 * 256).vision
LIMITS = 4 * 28 * 28, 28 * 28 * 256


def save(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def picture(width: int = 60, height: int = 40) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def header(data: bytes, **options: Any) -> image.ImageHeader:
    return read_image_header(io.BytesIO(data), **options)


#: In tables of formats: where the installed Pillow has it.
AVIF = ["AVIF"] * features.check("avif")


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", *AVIF])
def test_size_without_decoding(image_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = save(picture(), image_format)
    decoded = []
    monkeypatch.setattr(image, "_load", decoded.append)
    mode = "P" if image_format == "GIF" else "RGB"
    assert header(data) == image.ImageHeader(40, 60, image_format, mode)
    # Formats whose end cannot be recognised are decoded; the common ones never.
    assert bool(decoded) == (image_format in ("BMP", "TIFF", "AVIF"))


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF", *AVIF])
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


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "GIF", *AVIF])
@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
def test_truncated_images_are_found_from_the_file_alone(image_format: str, keep: float) -> None:
    data = save(picture(200, 160), image_format)
    with pytest.raises(SampleError) as error:
        header(data[: int(len(data) * keep)])
    assert error.value.reason in ("truncated_image", "bad_image")


@pytest.mark.parametrize("progressive", [False, True])
def test_bytes_after_a_jpeg_are_not_decoded(
    progressive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its thumbnail has an end marker, and its scans cross blocks.
    exif = Image.Exif().tobytes() + save(picture(8, 8), "JPEG")
    data = save(picture(), "JPEG", progressive=progressive, exif=exif)
    decoded: list[Image.Image] = []
    monkeypatch.setattr(image, "_load", decoded.append)
    for block in (200, 1 << 18):
        monkeypatch.setattr(image, "_BLOCK", block)
        assert header(data + bytes(100)).width == 60
        assert not decoded
        header(data[:-2] + bytes(100))  # it may be truncated
        assert decoded.pop()


def phone_files(**options: Any) -> dict[str, bytes]:
    """Pictures as phones write them: an MPF segment, second pictures, and other bytes after them.
    The end of the first picture of "short MPF" is not where its MPF segment says."""
    first, second = picture(200, 160), save(picture(), "JPEG")
    several = {"save_all": True, "append_images": [picture()], **options}
    stereo, plain = save(first, "MPO", **several), save(first, "JPEG", **options)
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
    assert header(data)[:2] == (160, 200)


@pytest.mark.parametrize("form", phone_files())
def test_a_phones_picture_that_lost_its_end_is_found(form: str) -> None:
    data = phone_files()[form]
    end = data.index(b"\xff\xd9", 1000)
    for begin in (end // 2, end - 50, end):
        for cut in (data[:begin], data[:begin] + data[end + 2 :]):  # what follows it is there
            reasons = set()
            for run in (header, decode_image):
                try:
                    run(cut)
                    reasons.add("")
                except SampleError as error:
                    reasons.add(error.reason)
            # A decoder takes a clip's bytes for the rest of the picture.
            assert reasons == {"truncated_image"} or (reasons == {""} and b"ftyp" in cut)


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


NO_IMAGES = [b"", b"\xff\xd8\xff", b"no image", b"<svg/>", b"%!PS-Adobe", b"\x89PNG\r\n\x1a\n"]
LONG = {
    "fill bytes": b"\xff\xd8" + b"\xff" * 50_000 + b"\xff\xd9",
    "segments": b"\xff\xd8" + b"\xff\xe5\0\2" * 50_000 + b"\xff\xd9",
    "chunks": save(picture(), "PNG")[:33] + png_chunk(b"abCd", b"") * 50_000,
    "comments": b"GIF89a" + bytes(7) + b"\x21\xfe" + b"\1c" * 50_000,
}


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        *(("bad_image", data) for data in (*NO_IMAGES, b"\0" * 600)),
        *(pytest.param("too_costly", data, id=name) for name, data in LONG.items()),
    ],
)
def test_what_is_no_image_or_hides_it_is_refused(reason: str, data: bytes) -> None:
    with pytest.raises(SampleError) as error:
        header(data)
    assert error.value.reason == reason


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


def test_a_pixel_bomb_is_refused_from_its_header() -> None:
    ihdr = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", ihdr), (b"IDAT", b""), (b"IEND", b""))
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)
    for data, options in ((bomb, {}), (save(picture(), "PNG"), {"max_image_pixels": 2_000})):
        for run in (header, decode_image):
            with pytest.raises(SampleError) as error:
                run(data, **options)
            assert error.value.reason == "image_too_large"


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
            smart_resize(height, width, SETTINGS, LIMITS)
        else:
            with pytest.raises(SampleError, match="200:1"):
                smart_resize(height, width, SETTINGS, LIMITS)


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


def outcome(data: bytes) -> object:
    """The header, or the reason."""
    try:
        return header(data)
    except SampleError as error:
        return error.reason


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
    assert read_plain(io.BytesIO(NOT_PLAIN[name])) is None


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


FAMILIES = ("qwen2_vl", "qwen3_vl")


def smooth(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    coarse = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def by_torch(image: Image.Image, grid: tuple[int, ...], vision: Any) -> Any:
    """The steps of transformers' torch backend, one after another."""
    _, h, w = grid
    patch, merge = vision.patch_size, vision.merge_size
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    size = (h * patch, w * patch)
    resized = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
    mean, std = (torch.tensor(x) * (1.0 / (1 / 255)) for x in (vision.mean, vision.std))
    values = (resized.float() - mean[:, None, None]) / std[:, None, None]
    blocks = values.reshape(3, h // merge, merge, patch, w // merge, merge, patch)
    ordered = blocks.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    return ordered.expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(h * w, -1).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_resizes_as_transformers_torch_backend(family: str) -> None:
    rng = np.random.default_rng(0)
    encoder: Any = build_sample_encoder(family, resize="torch", max_pixels=200_000)
    for _ in range(20):
        width, height = (int(side) for side in rng.integers(20, 500, 2))
        image = smooth(rng, width, height)
        rows, (grid, _) = encoder.encode_image(image)
        values = encoder.normalisation.values(rows, 2)
        np.testing.assert_array_equal(values, by_torch(image, grid, encoder.vision))


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


@pytest.mark.parametrize("resize", BACKENDS)
def test_images_that_pillow_holds_in_blocks(resize: str) -> None:
    """Patches of 5 megapixels: their memory is not handed out."""
    encoder: Any = build_sample_encoder("qwen2_vl", resize=resize, max_pixels=200_000)
    image = smooth(np.random.default_rng(3), 1200, 5000)
    with pytest.raises(ValueError, match=r"not contiguous|in multiple array blocks"):
        pa.array(image)
    rows, (grid, _) = encoder.encode_image(image)
    size = grid[2] * 14, grid[1] * 14
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(expected, size[::-1], mode="bicubic", antialias=True)
    pixels = expected[0].permute(1, 2, 0).numpy()
    if resize == "pil":
        pixels = np.array(image.resize(size, Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(rows[0].reshape(3, 14, 14), pixels[:14, :14].transpose(2, 0, 1))


@pytest.mark.parametrize("options", [{}, {"resize": "pil"}, {"resize": "torch"}])
@pytest.mark.parametrize(("family", "default"), [("qwen2_vl", "pil"), ("qwen3_vl", "torch")])
def test_the_backend_is_known_from_what_is_stored(
    family: str, default: str, options: dict[str, str]
) -> None:
    settings = model_options(**{"family": family, **options})
    assert settings.resize == options.get("resize", default)
    stored = settings.model_dump(mode="json")
    assert model_options(**stored) == settings
    assert stored["resize"] == settings.resize
    if family == "qwen2_vl":  # lengths do not depend on it
        usual = build_sample_encoder(family).fingerprint
        assert build_sample_encoder(family, **options).fingerprint == usual


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4])
def test_the_last_frame_fills_its_step(num_frames: int) -> None:
    vision = build_sample_encoder("qwen2_vl").vision  # type: ignore[attr-defined]
    rng = np.random.default_rng(2)
    frames = [smooth(rng, 56, 56) for _ in range(num_frames)]
    grid = (-(-num_frames // 2), 4, 4)
    values = frame_patches(frames, grid, 2, vision).reshape(grid[0], 16, 3, 2, 196)
    for step in range(grid[0]):
        for within in range(2):
            frame = frames[min(step * 2 + within, num_frames - 1)]
            alone = frame_patches([frame], (1, 4, 4), 1, vision).reshape(16, 3, 196)
            np.testing.assert_array_equal(values[step, :, :, within], alone)


@pytest.mark.parametrize("resize", BACKENDS)
@pytest.mark.parametrize("side", [16, 48])
def test_channels_last(side: int, resize: str) -> None:
    """Each byte in its place, of all frames."""
    rng = np.random.default_rng(side)
    frames = [Image.fromarray(rng.integers(0, 256, (70, 90, 3), dtype=np.uint8)) for _ in range(2)]
    grid = (2, 3, 5)
    rows = interleaved_patches(frames, grid, side, resize)
    scale, _ = BACKENDS[resize]
    pixels = np.stack([scale(frame, 3 * side, 5 * side)[..., :3] for frame in frames])
    blocks = pixels.reshape(2, 3, side, 5, side, 3).swapaxes(2, 3)
    np.testing.assert_array_equal(rows, blocks.reshape(30, -1))
