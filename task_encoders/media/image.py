"""Images: their size without decoding them, and their pixels.

Both stages go through `_open`, so that measuring and encoding agree on an image's size and
orientation, and on which images are bad. Measuring skips this for a JPEG or PNG about which nothing
is in doubt: Pillow takes two to five times as long, most of it for tables and tags that measuring
does not need. Whatever is not plain (several pictures, arithmetic coding, a damaged segment, a tag
of an unusual type) is left to Pillow: the result is the same. Transparency is composed on white.
"""

import io
import math
import re
import struct
import warnings
import zlib
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, JpegImagePlugin, UnidentifiedImageError

from task_encoders.samples import SampleError
from task_encoders.samples.limits import (
    DECODING_COST,
    MAX_HEADER_BYTES,
    MAX_HEADER_READS,
    MAX_IMAGE_EXTRA,
    MAX_IMAGE_PIXELS,
    MAX_PIXEL_BYTES,
    MAX_SCANNED_PIXELS,
)
from task_encoders.storage.remote_requests import in_a_line

#: Formats that are read, and MPO, which is found among the JPEGs. Pillow knows more, and some of
#: them call external programs.
_OPENED: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")

#: First bytes of pictures that are not read, and of AVIF, which some builds of Pillow do not read.
_NOT_READ: Final = {
    "AVIF": rb"....ftypavi[fs]",
    "HEIC": rb"....ftyp(?:he[iv]|mif1|msf1)",
    "JPEG XL": rb"\xff\n|....JXL ",
    "JPEG 2000": rb"\xffO\xffQ|....jP  ",
    "SVG": rb"[^<]{0,9}(?:<[?!].{0,900}?)?<svg",
}

# The limit on pixels is checked on every image, and is an error instead of Pillow's warning.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

#: A PNG's EXIF may follow its pixels; in other formats only the end marker is looked at.
_TAIL_BYTES: Final = 65_536
_END_BYTES: Final = 16
_JPEG_END: Final = b"\xff\xd9"
#: Rows that are composed on white at a time.
_BAND: Final = 256


#: Mean and standard deviation of pixels, as CLIP and most vision towers since were trained.
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)


class ImageHeader(NamedTuple):
    """Size in pixels with EXIF orientation applied, and Pillow's name of the format."""

    height: int
    width: int
    format: str
    #: Pillow's mode
    mode: str = "RGB"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSettings:
    """Patches of a model family, and how pictures are resized to them."""

    patch_size: int
    temporal_patch_size: int = 2
    merge_size: int = 2
    max_aspect_ratio: float = math.inf
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    #: a name in patches.BACKENDS
    resize: str = "pil"
    #: whether the channels of a pixel are next to each other in its patch
    channels_last: bool = False

    @property
    def factor(self) -> int:
        """Side in pixels of one image token: a square of merge_size² patches."""
        return self.patch_size * self.merge_size


def smart_resize(
    height: int,
    width: int,
    settings: VisionSettings,
    limits: tuple[int, int],
    num_frames: int = 1,
    num_counted: int = 1,
) -> tuple[int, int]:
    """Return the height and width that pictures are resized to: multiples of `factor`, with the
    pixels of all `num_frames` within `limits`, and the aspect ratio kept as closely as that allows.

    The rule of Qwen2-VL (https://arxiv.org/abs/2409.12191, its image processor's smart_resize),
    with Python's rounding of halves to even. Whether the limits are met is decided for
    `num_counted` frames.

    Raises:
        SampleError: aspect ratio above the limit.
    """
    if max(height, width) > settings.max_aspect_ratio * min(height, width):
        raise SampleError(
            "aspect_ratio", f"{width}x{height} is longer than {settings.max_aspect_ratio:g}:1"
        )
    factor, (least, most) = settings.factor, limits
    rows, columns = round(height / factor), round(width / factor)
    volume = num_counted * rows * columns * factor**2
    if volume > most:
        shrink = math.sqrt((num_frames * height * width) / most)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif volume < least:
        grow = math.sqrt(least / (num_frames * height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def read_image_header(file: BinaryIO, *, max_image_pixels: int = MAX_IMAGE_PIXELS) -> ImageHeader:
    """Read the size of an image from the head and the tail of its file (seekable, binary).

    Raises:
        SampleError: bad_image, truncated_image, image_too_large or too_costly.
    """
    if plain := read_plain(file):
        header, decoder = plain
        pixels, cost = header.height * header.width, DECODING_COST.get(decoder, 1)
        if pixels <= min(max_image_pixels, MAX_IMAGE_PIXELS) / cost:
            size = file.seek(-_END_BYTES, io.SEEK_END) + _END_BYTES
            tail = file.read(_END_BYTES)
            _check_cost(file, size, (header.width, header.height), decoder, max_image_pixels)
            if _ends_properly(header.format, tail, file):
                return header
    file.seek(0)
    image, tail = _open(file, max_image_pixels)
    with image:
        if not _ends_properly(image.format or "", tail, file, _first_size(image)):
            _load(image)
        width, height = image.size
        if _orientation(image, tail) >= 5:  # 5 to 8 swap the axes
            width, height = height, width
        return ImageHeader(height, width, image.format or "", image.mode)


def decode_image(data: bytes, *, max_image_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """Decode an image file to RGB on white, EXIF orientation applied.

    Raises:
        SampleError: as read_image_header.
    """
    image, tail = _open(io.BytesIO(data), max_image_pixels)
    orientation = _orientation(image, tail)  # as measured: before a PNG's last chunks are read
    _load(image)
    if orientation != 1:
        image = ImageOps.exif_transpose(image)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    # Composed on white, as transformers' processors compose an open image of any mode: the colour
    # of transparent pixels is often black. In bands: of the whole there would be four copies.
    composed = np.empty((image.height, image.width, 3), dtype=np.uint8)
    for top in range(0, image.height, _BAND):
        band = image.crop((0, top, image.width, min(top + _BAND, image.height))).convert("RGBA")
        white = Image.new("RGBA", band.size, (255, 255, 255, 255))
        composed[top : top + _BAND] = np.asarray(Image.alpha_composite(white, band).convert("RGB"))
    del image  # it and what is returned take four bytes for each pixel
    return Image.fromarray(composed)


@dataclass(slots=True)
class _CountedFile:
    """A file for Pillow that is read so often, and so much of it, until an image's size is found:
    a header may hold millions of empty segments, or tags that point at the same place."""

    file: BinaryIO
    bytes_left: float
    reads_left: float = MAX_HEADER_READS

    def read(self, size: int = -1) -> bytes:
        """Read, and count what is read. Raises SampleError: too_costly."""
        data = self.file.read(size)
        self.reads_left -= 1
        self.bytes_left -= len(data)
        if self.reads_left < 0 or self.bytes_left < 0:
            raise SampleError("too_costly", f"no picture within {MAX_HEADER_READS:,} reads of it")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _open(file: BinaryIO, max_image_pixels: int) -> tuple[Image.Image, bytes]:
    """Open an image, its pixels not decoded; return it with the last bytes of its file."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    counted = _CountedFile(file, MAX_HEADER_BYTES + 2 * size)
    try:
        image = Image.open(counted, formats=_OPENED)
    except SampleError:
        raise
    except Image.DecompressionBombError as error:
        raise SampleError("image_too_large", str(error)) from error
    except UnidentifiedImageError as error:
        problem = "cannot identify image file" if size else "the file is empty"
        file.seek(0)
        head = file.read(HEAD_BYTES)
        kinds = [kind for kind, begin in _NOT_READ.items() if re.match(begin, head, re.DOTALL)]
        if kinds:
            problem = f"{kinds[0]} is not read; convert it, for example to PNG"
        raise SampleError("bad_image", problem) from error
    except Exception as error:
        raise SampleError("bad_image", in_a_line(error)[:200]) from error
    counted.reads_left = counted.bytes_left = math.inf  # pixels may take any number
    position = file.tell()
    decoder = "progressive" if image.info.get("progressive") else image.format or ""
    _check_cost(file, size, image.size, decoder, max_image_pixels)
    count = _TAIL_BYTES if image.format == "PNG" else _END_BYTES
    file.seek(max(0, size - count))
    tail = file.read(count)
    file.seek(position)
    return image, tail


def _check_cost(
    file: BinaryIO, file_size: int, size: tuple[int, int], decoder: str, max_image_pixels: int
) -> None:
    """Raise SampleError: image_too_large for (width, height) of more pixels than may be decoded;
    too_costly for a file that is mostly something other than the picture, since packs would carry
    it, and for a progressive JPEG of too many scans."""
    pixels = size[0] * size[1]
    if pixels > int(max_image_pixels / DECODING_COST.get(decoder, 1)):
        of = f" / {DECODING_COST[decoder]:g} ({decoder})" if decoder in DECODING_COST else ""
        raise SampleError(
            "image_too_large",
            f"{size[0]}x{size[1]} pixels > max_image_pixels {max_image_pixels}{of}",
        )
    limit = MAX_IMAGE_EXTRA + MAX_PIXEL_BYTES * pixels
    if file_size > limit:
        raise SampleError(
            "too_costly",
            f"{file_size:,} bytes for {pixels:,} pixels > {limit:,}; save the picture anew",
        )
    most = MAX_SCANNED_PIXELS // max(1, pixels)
    # Each scan goes through all pixels; only a file that can hold too many scans is read.
    if decoder == "progressive" and file_size // _MIN_SCAN_BYTES > most:
        file.seek(0)
        num_scans, last = 0, b""
        while block := file.read(_BLOCK):
            data = np.frombuffer(last + block, dtype=np.uint8)  # a fifth of what bytes.count takes
            num_scans += int(np.count_nonzero((data[:-1] == 0xFF) & (data[1:] == 0xDA)))
            last = block[-1:]
        if num_scans > most:
            raise SampleError("too_costly", f"{num_scans:,} scans of {pixels:,} pixels > {most:,}")


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except Exception as error:
        raise SampleError("truncated_image", in_a_line(error)[:200]) from error


def _ends_properly(image_format: str, tail: bytes, file: BinaryIO, first_size: int = 0) -> bool:
    """Tell whether a complete image of its format ends with the file, or where its first picture
    has `first_size` bytes; other bytes may follow a JPEG's end marker."""
    if image_format in ("JPEG", "MPO"):
        if first_size >= len(_JPEG_END):
            file.seek(first_size - len(_JPEG_END))
            tail = file.read(len(_JPEG_END))
        return tail.endswith(_JPEG_END) or _has_jpeg_end(file)
    if image_format == "PNG":
        return tail.endswith(b"IEND\xaeB`\x82")
    if image_format == "GIF":
        return tail.endswith(b"\x3b")
    if image_format == "WEBP":
        file.seek(4)
        riff_size = int.from_bytes(file.read(4), "little")
        return riff_size + 8 == file.seek(0, io.SEEK_END)
    return False


def _first_size(image: Image.Image) -> int:
    """Return the bytes of the first picture of a JPEG, as the MPF segment says that phones write in
    front of a second one; 0 without such a segment."""
    try:
        return int(JpegImagePlugin._getmp(image)[0xB002][0]["Size"])  # type: ignore[arg-type, index]
    except Exception:  # noqa: BLE001 - damaged, which is for the end marker to tell
        return 0


def _orientation(image: Image.Image, tail: bytes) -> int:
    """Return the EXIF (or XMP) orientation, 1 if there is none or it cannot be parsed."""
    if image.format == "JPEG" and "exif" not in image.info and "xmp" not in image.info:
        return 1  # as most are; asking Pillow takes as long as opening the file
    if image.format == "PNG" and "exif" not in image.info and b"eXIf" in tail:
        _load(image)  # the chunk follows the pixels, where only decoding finds it
    try:
        # Image's own method: PngImageFile.getexif would decode every image without EXIF.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - broken EXIF is common, and no reason to lose an image
        return 1
    return orientation if orientation in range(1, 9) else 1


#: Bytes at the start of a file that are read, and after a segment beyond them.
HEAD_BYTES: Final = 4096
_BLOCK: Final = 1 << 18
#: Segments or chunks that are looked at. Pillow reads more, but no 64 texts of 1 MiB.
_MAX_SEGMENTS: Final = 60

_JPEG_START: Final = b"\xff\xd8\xff"
_PROGRESSIVE: Final = 0xFFC2
_SOF: Final = frozenset((0xFFC0, 0xFFC1, _PROGRESSIVE))  # and baseline, extended
_SOS: Final = 0xFFDA
_APP0, _APP1, _APP2, _APP13, _APP14 = 0xFFE0, 0xFFE1, 0xFFE2, 0xFFED, 0xFFEE
#: Huffman tables, restart interval, comment, and the APPn of which Pillow reads nothing.
_SKIPPED: Final = frozenset((0xFFC4, 0xFFDD, 0xFFFE, *range(0xFFE3, _APP13), 0xFFEF))
_segment = struct.Struct(">HH").unpack_from  # a marker, and the length after it
_frame = struct.Struct(">BHHB").unpack_from  # bits, height, width, components
_JPEG_MODES: Final = {1: "L", 3: "RGB", 4: "CMYK"}
_EXIF: Final = b"Exif\0\0"
_XMP: Final = b"http://ns.adobe.com/xap/1.0/\0"
_PREFIX_BYTES: Final = 4 + len(_XMP)
_TABLE_BYTES: Final = 65  # of an 8-bit quantization table with its number
_MIN_SCAN_BYTES: Final = 10
#: The end marker, the start of another picture, or another marker with the length of its segment;
#: neither stuffing nor a restart.
_JPEG_MARKER: Final = re.compile(rb"\xff(?:[\xd8\xd9]|[^\x00\x01\xff\xd0-\xd9](..))", re.DOTALL)

_PNG_START: Final = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"
_png_size = struct.Struct(">IIBBxB").unpack_from  # width, height, bits, color, filter
_chunk = struct.Struct(">I4s").unpack_from
_checksum = struct.Struct(">I").unpack_from
#: Pillow's modes by color and bits.
_PNG_MODES: Final = {
    0: {1: "1", 2: "L", 4: "L", 8: "L", 16: "I;16"},
    2: {8: "RGB", 16: "RGB"},
    3: dict.fromkeys((1, 2, 4, 8), "P"),
    4: {8: "LA", 16: "RGBA"},
    6: {8: "RGBA", 16: "RGBA"},
}
#: Least bytes of chunks that Pillow parses; it alone tells of animations and a missing picture.
_CHUNK_BYTES: Final = {b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9} | dict.fromkeys(
    (b"acTL", b"fcTL", b"fdAT", b"IHDR", b"IEND"), math.inf
)
_TRANSPARENCY_BYTES: Final = {"1": 2, "L": 2, "I;16": 2, "RGB": 6}
_XMP_KEY: Final = b"XML:com.adobe.xmp"
_EXIF_KEY: Final = b"Raw profile type exif"
#: Keys of texts that change what Pillow says of the orientation, or of the decoder.
_KEYS: Final = frozenset((_XMP_KEY, _EXIF_KEY, b"exif", b"xmp", b"progressive"))
#: Of an unpacked text, as Pillow allows it; a packed one of _SMALL_TEXT bytes is never larger.
_MAX_TEXT: Final = 1 << 20
_SMALL_TEXT: Final = 1000

#: SHORT and RATIONAL: with another type of these tags Pillow refuses some images.
_TAG_TYPES: Final = {int(ExifTags.Base.XResolution): 5, int(ExifTags.Base.ResolutionUnit): 3}
_TYPE_BYTES: Final = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4)  # of a value, by its type
_XMP_ORIENTATION: Final = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


#: Header before the orientation is applied, decoder, and tags that may hold the orientation.
_Found = tuple[ImageHeader, str, dict[bytes, bytes]]


def read_plain(file: BinaryIO) -> tuple[ImageHeader, str] | None:
    """Read the header of a JPEG or PNG from the start of its file, and its decoder as in
    DECODING_COST; None if Pillow must tell."""
    head = file.read(HEAD_BYTES)
    try:
        found = _read_jpeg(file, head) if head.startswith(_JPEG_START) else _read_png(file, head)
        orientation = _tagged_orientation(found[2]) if found and found[2] else 0
    except (struct.error, zlib.error, LookupError, ValueError):
        return None  # damaged, or of an unusual kind: Pillow tells which
    if found is None or orientation is None:
        return None
    header, decoder, _ = found
    if 5 <= orientation <= 8:  # these swap the axes
        header = header._replace(height=header.width, width=header.height)
    return header, decoder


def _read_on(file: BinaryIO, head: bytes, at: int, count: int) -> tuple[bytes, int]:
    """Read `count` bytes of a file from `at` on, and some more; return them with the place 0 in
    them. `head`, in or after which `at` is, was read last."""
    if at > len(head):
        file.seek(at - len(head), io.SEEK_CUR)
    return head[at:] + file.read(count + HEAD_BYTES), 0


def _read_jpeg(file: BinaryIO, head: bytes) -> _Found | None:
    frame: tuple[ImageHeader, str] | None = None
    tags: dict[bytes, bytes] = {}
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if at + _PREFIX_BYTES > len(head):
            head, at = _read_on(file, head, at, _PREFIX_BYTES)
        marker, length = _segment(head, at)
        if length < 2:
            return None
        if (
            marker in _SKIPPED
            or (marker == _APP1 and not head.startswith((_EXIF, _XMP), at + 4))
            or (marker == _APP2 and length >= 16 and head.startswith(b"ICC_PROFILE\0", at + 4))
        ):
            at += 2 + length
            continue
        if at + 2 + length > len(head):
            head, at = _read_on(file, head, at, length)
        segment = head[at + 4 : at + 2 + length]
        if len(segment) < length - 2:
            return None
        at += 2 + length
        if marker == _SOS:
            return frame and (*frame, tags)
        if marker == _APP1:
            kind = _EXIF if segment.startswith(_EXIF) else _XMP
            tags[kind] = tags[kind] + segment[6:] if kind == _EXIF in tags else segment
        elif marker in _SOF and frame is None:
            bits, height, width, components = _frame(segment)
            if bits != 8 or not height or not width or len(segment) != 6 + 3 * components:
                return None
            header = ImageHeader(height, width, "JPEG", _JPEG_MODES[components])
            frame = header, "progressive" if marker == _PROGRESSIVE else "JPEG"
        elif not _is_plain(marker, segment):
            return None
    return None


def _is_plain(marker: int, segment: bytes) -> bool:
    """Tell whether Pillow reads a segment without an error, and nothing of size and orientation."""
    if marker == 0xFFDB:  # quantization tables
        numbers = segment[::_TABLE_BYTES]
        return len(segment) == _TABLE_BYTES * len(numbers) and max(numbers, default=16) < 16
    if marker == _APP0:
        return len(segment) >= 7 or not segment.startswith(b"JFIF")
    if marker == _APP13:  # an error where it ends between the number and the name of a resource
        return segment[-6:-2] != b"8BIM"
    return marker == _APP14 and (len(segment) >= 7 or not segment.startswith(b"Adobe"))


def _read_png(file: BinaryIO, head: bytes) -> _Found | None:
    width, height, bits, color, filter_method = _png_size(head, 16)
    valid = width and height and not filter_method and head.startswith(_PNG_START)
    if not valid or zlib.crc32(head[12:29]) != _checksum(head, 29)[0]:
        return None
    mode = _PNG_MODES[color][bits]
    tags: dict[bytes, bytes] = {}
    at, is_late = 33, False  # after the pixels, for EXIF that follows them
    for _ in range(_MAX_SEGMENTS):
        if at + 8 > len(head):
            head, at = _read_on(file, head, at, 8)
        length, kind = _chunk(head, at)
        if kind == b"IDAT" and not is_late and _EXIF not in tags:
            position = file.tell()
            is_late = _has_late_exif(file, position - len(head) + at, 12 + length)
            if is_late:
                file.seek(position)
        if kind == (b"IEND" if is_late else b"IDAT"):
            return ImageHeader(height, width, "PNG", mode), "PNG", tags
        if kind != b"IDAT":
            if length > _MAX_TEXT or not kind.isalnum():
                return None
            if at + 12 + length > len(head):
                head, at = _read_on(file, head, at, length)
            data = head[at + 8 : at + 8 + length]
            if zlib.crc32(data, zlib.crc32(kind)) != _checksum(head, at + 8 + length)[0]:
                return None
            if kind == b"eXIf":
                tags[_EXIF] = _EXIF + data
            elif kind in (b"tEXt", b"zTXt", b"iTXt", b"iCCP"):
                if not _take_text(kind, data, tags):
                    return None
            elif length < (
                _TRANSPARENCY_BYTES.get(mode, 0) if kind == b"tRNS" else _CHUNK_BYTES.get(kind, 0)
            ):
                return None
        at += 12 + length
    return None


def _has_late_exif(file: BinaryIO, first: int, step: int) -> bool:
    """Tell whether EXIF may follow the pixels of a PNG whose first IDAT chunk is at `first` and
    takes `step` bytes. Most writers make all but the last chunk of one size: if the last one, where
    it must begin, ends where the last twelve bytes of the file begin, nothing else is there."""
    size = file.seek(0, io.SEEK_END)
    last = first + (size - 13 - first) // step * step
    if last > first:
        file.seek(last)
        rest = file.read(min(size - last, _TAIL_BYTES))  # with the end: one request
        length, kind = _chunk(rest)
        step = 12 + length if kind == b"IDAT" else 0
    if last + step == size - 12:
        return False
    file.seek(max(0, size - _TAIL_BYTES))
    return file.read(_TAIL_BYTES).rfind(b"eXIf") >= 0


def _take_text(kind: bytes, data: bytes, tags: dict[bytes, bytes]) -> bool:
    """Add a PNG's text to `tags` if it may hold an orientation; return False if Pillow must
    tell."""
    key, _, text = data.partition(b"\0")
    is_packed = method = 0
    if kind == b"iTXt":
        is_packed, method, text = text[0], text[1], text[2:].split(b"\0", 2)[2]
    elif kind != b"tEXt":
        is_packed, method, text = 1, text[0], text[1:]
    is_used = key in _KEYS and kind != b"iCCP"
    if is_packed and (is_used or len(text) > _SMALL_TEXT):
        unpack = zlib.decompressobj()
        text = unpack.decompress(text, _MAX_TEXT)
        if unpack.unconsumed_tail:
            return False
    if is_used:
        if key in tags or key != (_XMP_KEY if kind == b"iTXt" else _EXIF_KEY):
            return False
        tags[key] = text
    return not method


def _tagged_orientation(tags: dict[bytes, bytes]) -> int | None:
    """Return the orientation by a file's EXIF, or else its XMP, as Pillow reads them; 0 if there is
    none, None if Pillow must tell."""
    exif = tags.get(_EXIF)
    if exif is None and _EXIF_KEY in tags:
        exif = bytes.fromhex("".join(tags[_EXIF_KEY].decode("latin-1").split("\n")[3:]))
    if exif is not None:
        data = re.sub(b"^(Exif\0\0){1,2}", b"", exif)
        order = {b"II*\0": "<", b"MM\0*": ">"}[data[:4]]
        begin = struct.unpack_from(order + "L", data, 4)[0] + 2
        end = begin + 12 * struct.unpack_from(order + "H", data, begin - 2)[0]
        found = None
        for tag, kind, count, value in struct.iter_unpack(order + "HHLL", data[begin:end]):
            size = count * _TYPE_BYTES[kind]
            if (size > 4 and value + size > len(data)) or _TAG_TYPES.get(tag, kind) != kind:
                return None
            if tag == ExifTags.Base.Orientation and found is None:
                if kind != 3 or count != 1:
                    return None
                found = value >> 16 if order == ">" else value & 0xFFFF
        if found is not None:
            return found
    match = _XMP_ORIENTATION.search(tags.get(_XMP) or tags.get(_XMP_KEY, b""))
    return int(match[1]) if match else 0


def _has_jpeg_end(file: BinaryIO) -> bool:
    """Tell whether a JPEG has its own end marker: one before another picture starts."""
    file.seek(0)
    rest, at = b"", 2
    while block := file.read(_BLOCK):
        block = rest + block
        while marker := _JPEG_MARKER.search(block, at):
            if marker[1] is None:
                return marker[0] == _JPEG_END
            at = marker.start() + 2 + int.from_bytes(marker[1], "big")
        rest = block[-3:]
        at = max(0, at - len(block) + len(rest))
    return False
