"""Images: their size without decoding them, and their pixels.

Both stages go through `_open`, so that measuring and encoding agree on an image's size and
orientation, and on which images are bad. Measuring skips this for a JPEG about which nothing is
in doubt: opening it with Pillow takes about 30 µs, most of it for tables that measuring does not
need; reading its first bytes takes 5. Whatever is not plain (EXIF, several pictures, arithmetic
coding, a damaged segment) is left to Pillow: the result is the same. Transparency is composed on
white.
"""

import io
import math
import struct
import warnings
from dataclasses import KW_ONLY, dataclass
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

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

#: Formats that are read. Pillow knows more, and some of them call external programs.
FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO")

#: MPO is found among the JPEGs.
_OPENED: Final = FORMATS[:-1]

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
    #: Pillow's mode; of a plain JPEG, which Pillow does not open, one of the modes with 8 bits
    mode: str = "RGB"


@dataclass(frozen=True, slots=True)
class VisionSettings:
    """Patches of a model family, and limits of the size of images."""

    min_pixels: int
    max_pixels: int
    max_aspect_ratio: float
    max_image_pixels: int = MAX_IMAGE_PIXELS
    _: KW_ONLY
    patch_size: int
    temporal_patch_size: int = 2
    merge_size: int = 2
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    #: a name in patches.BACKENDS
    resize: str = "pil"

    def __post_init__(self) -> None:
        smallest = self.factor**2
        if not smallest <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"min_pixels {self.min_pixels} and max_pixels {self.max_pixels} must satisfy "
                f"{smallest} <= min_pixels <= max_pixels; a token has {smallest} pixels"
            )

    @property
    def factor(self) -> int:
        """Side in pixels of one image token: a square of merge_size² patches."""
        return self.patch_size * self.merge_size


def smart_resize(
    height: int, width: int, settings: VisionSettings, pixels: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Height and width an image or a frame is resized to: multiples of `factor`, total within the
    pixel limits (`pixels`: instead of the settings' limits), aspect ratio kept as closely as that
    allows.

    The rule of Qwen2-VL (https://arxiv.org/abs/2409.12191, its image processor's smart_resize),
    with Python's rounding of halves to even.

    Raises:
        SampleError: aspect ratio above the limit.
    """
    if max(height, width) > settings.max_aspect_ratio * min(height, width):
        raise SampleError(
            "aspect_ratio", f"{width}x{height} is longer than {settings.max_aspect_ratio:g}:1"
        )
    factor = settings.factor
    least, most = pixels or (settings.min_pixels, settings.max_pixels)
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > most:
        shrink = math.sqrt((height * width) / most)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns * factor**2 < least:
        grow = math.sqrt(least / (height * width))
        rows = math.ceil(height * grow / factor)
        columns = math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def read_image_header(file: BinaryIO, *, max_image_pixels: int = MAX_IMAGE_PIXELS) -> ImageHeader:
    """Size of an image from the head and the tail of its file (seekable, binary).

    Pixels are decoded only where the file does not end as its format ends, to tell a truncated
    image from one followed by other bytes.

    Raises:
        SampleError: bad_image, truncated_image, image_too_large or too_costly.
    """
    plain = jpeg_size(file.read(HEAD_BYTES))
    if plain is not None and plain.pixels <= min(max_image_pixels, MAX_IMAGE_PIXELS) / (
        DECODING_COST["progressive"] if plain.is_progressive else 1
    ):
        file_size = file.seek(-len(_JPEG_END), io.SEEK_END) + len(_JPEG_END)
        if file.read(len(_JPEG_END)) == _JPEG_END:
            decoder = "progressive" if plain.is_progressive else "JPEG"
            _check_cost(file, file_size, (plain.width, plain.height), decoder, max_image_pixels)
            return ImageHeader(plain.height, plain.width, "JPEG")
    file.seek(0)
    image, tail = _open(file, max_image_pixels)
    with image:
        if not _ends_properly(image.format or "", tail, file):
            _load(image)
        width, height = image.size
        if _orientation(image, tail) >= 5:  # 5 to 8 swap the axes
            width, height = height, width
        return ImageHeader(height, width, image.format or "", image.mode)


def decode_image(data: bytes, *, max_image_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """An image file as an RGB image on white, EXIF orientation applied.

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
        """Raises SampleError: too_costly."""
        data = self.file.read(size)
        self.reads_left -= 1
        self.bytes_left -= len(data)
        if self.reads_left < 0 or self.bytes_left < 0:
            raise SampleError("too_costly", f"no picture within {MAX_HEADER_READS:,} reads of it")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _open(file: BinaryIO, max_image_pixels: int) -> tuple[Image.Image, bytes]:
    """Header of an image (pixels not decoded), and the last bytes of its file."""
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
        raise SampleError("bad_image", problem) from error
    except Exception as error:
        raise SampleError("bad_image", one_line(error)) from error
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
    if decoder == "progressive":
        check_scans(file, file_size, pixels)


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except Exception as error:
        raise SampleError("truncated_image", one_line(error)) from error


def _ends_properly(image_format: str, tail: bytes, file: BinaryIO) -> bool:
    """Whether the file ends as a complete image of its format does."""
    if image_format in ("JPEG", "MPO"):
        return tail.endswith(_JPEG_END)
    if image_format == "PNG":
        return tail.endswith(b"IEND\xaeB`\x82")
    if image_format == "GIF":
        return tail.endswith(b"\x3b")
    if image_format == "WEBP":
        file.seek(4)
        riff_size = int.from_bytes(file.read(4), "little")
        return riff_size + 8 == file.seek(0, io.SEEK_END)
    return False


def _orientation(image: Image.Image, tail: bytes) -> int:
    """EXIF (or XMP) orientation, 1 where there is none or it cannot be parsed."""
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


def one_line(error: Exception) -> str:
    """Type and text of an error, as a detail of a SampleError."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


#: Bytes at the start of a file that are searched.
HEAD_BYTES: Final = 4096

_PROGRESSIVE: Final = 0xFFC2
_SOF: Final = frozenset((0xFFC0, 0xFFC1, _PROGRESSIVE))  # and baseline, extended
_SOS: Final = 0xFFDA
_SKIPPED: Final = frozenset((0xFFC4, 0xFFDD, 0xFFFE))  # Huffman tables, restart interval, comment
_segment = struct.Struct(">HH").unpack_from  # a marker, and the length after it
_frame = struct.Struct(">BHHB").unpack_from  # bits, height, width, components
_TABLE_BYTES: Final = 65  # of an 8-bit quantization table with its number
_SCAN: Final = b"\xff\xda"
_MIN_SCAN_BYTES: Final = 10
_BLOCK: Final = 1 << 20


class PlainJpeg(NamedTuple):
    """Size in pixels of a JPEG without EXIF orientation, and whether it comes in many scans."""

    height: int
    width: int
    is_progressive: bool

    @property
    def pixels(self) -> int:
        """Size of the whole picture."""
        return self.height * self.width


def jpeg_size(head: bytes) -> PlainJpeg | None:
    """The JPEG that begins with these bytes, or None where Pillow must tell."""
    if not head.startswith(b"\xff\xd8\xff"):
        return None
    size: PlainJpeg | None = None
    available = len(head)
    end = 2  # of the last segment
    while end + 4 <= available:
        begin = end + 4
        marker, length = _segment(head, end)
        end += 2 + length
        if length < 2 or end > available:
            return None
        if marker in _SKIPPED:  # as Pillow does
            continue
        if marker == _SOS:
            return size
        if marker in _SOF and size is None:
            # The frame, if it has eight bits, is grey or of three components, and not empty.
            if end - begin not in (6 + 3, 6 + 9):
                return None
            bits, height, width, components = _frame(head[begin:end])
            if bits != 8 or not height or not width or end - begin != 6 + 3 * components:
                return None
            size = PlainJpeg(height, width, marker == _PROGRESSIVE)
        elif not _is_plain(marker, head[begin:end]):
            return None
    return None


def check_scans(file: BinaryIO, file_size: int, pixels: int) -> None:
    """Raise SampleError: too_costly for a progressive JPEG with many scans, each of which goes
    through all pixels. Only a file large enough to hold too many scans is read."""
    limit = MAX_SCANNED_PIXELS // max(1, pixels)
    if file_size // _MIN_SCAN_BYTES <= limit:
        return
    file.seek(0)
    num_scans, last = 0, b""
    while block := file.read(_BLOCK):
        num_scans += (last + block).count(_SCAN)
        last = block[-1:]
    if num_scans > limit:
        raise SampleError("too_costly", f"{num_scans:,} scans of {pixels:,} pixels > {limit:,}")


def _is_plain(marker: int, segment: bytes) -> bool:
    """Whether a segment is intact and cannot affect the picture's size or orientation."""
    if marker == 0xFFDB:  # quantization tables
        numbers = segment[::_TABLE_BYTES]
        return len(segment) == _TABLE_BYTES * len(numbers) and max(numbers, default=16) < 16
    if marker == 0xFFE0:  # APP0
        return segment.startswith(b"JFIF\0") and len(segment) >= 14
    if marker == 0xFFE2:  # APP2
        return segment.startswith(b"ICC_PROFILE\0") and len(segment) >= 14
    return False
