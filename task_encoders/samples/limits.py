"""Limits of the cost of reading one sample. A sample beyond them is set aside as `too_costly` (a
picture with too many pixels as `image_too_large`), so that no file takes more than about 1 GiB or a
minute. No limit depends on time or on the machine: the same input gives the same bytes.

The first three are defaults of options of a source, `MAX_IMAGE_PIXELS` is one of the model's.
"""

import json
from typing import Any, Final

import orjson

from task_encoders.samples import SampleError, SourceSample

#: Characters of all texts of a sample, and of an id: some 500,000 tokens of English.
MAX_TEXT_LENGTH: Final = 2_000_000
#: Messages of a conversation.
MAX_MESSAGES: Final = 50_000
#: Images and videos of a sample; one that is named twice counts twice.
MAX_MEDIA: Final = 4_096

#: A record with a larger JSON is refused before it is read into memory,
MAX_JSON_BYTES: Final = 32 << 20
#: and one with more values before it is parsed: small ones take 200 bytes each.
MAX_JSON_VALUES: Final = 2_000_000

#: Every digit as 0, and the digits of an integer beyond 64 bits.
_DIGITS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_LONG: Final = b"0" * 20

#: A row of a table, with its images and videos.
MAX_ROW_BYTES: Final = 192 << 20

#: White space in a row. Tokenizers try it in several ways and run out of stack at a million.
MAX_WHITE_SPACE: Final = 1 << 18
#: Marks on one character. Unicode's own bound is 30; normalizing n takes n² steps.
MAX_MARKS: Final = 1 << 10

#: Pixels of an image file: Pillow's threshold for a decompression bomb.
MAX_IMAGE_PIXELS: Final = 89_478_485
#: Memory of a format's decoder as a multiple of that of other images. WebP's decoder holds two
#: canvases, TIFF's strips, progressive JPEG's all coefficients, a video's up to 17 reference frames
#: (measured: 27 to 42 bytes for each pixel of a frame).
DECODING_COST: Final = {"WEBP": 2.0, "AVIF": 2.0, "TIFF": 1.5, "progressive": 1.5, "video": 4.0}
#: Largest image file in bytes: no format takes more per pixel, plus room for metadata.
MAX_PIXEL_BYTES: Final = 16
MAX_IMAGE_EXTRA: Final = 4 << 20
#: Pixels of a progressive JPEG times its scans: each goes through the whole picture.
MAX_SCANNED_PIXELS: Final = 4_000_000_000
#: Reads of a file, most of a few bytes, until an image's size is found.
MAX_HEADER_READS: Final = 1 << 14
#: Bytes read meanwhile, beyond twice the file's own: headers may point at the same place often.
MAX_HEADER_BYTES: Final = 16 << 20


def check_cost(
    sample: SourceSample, *, max_text_length: int, max_messages: int, max_media: int
) -> None:
    """Raise SampleError: too_costly where a sample has more than this."""
    num_messages = num_characters = 0
    for turn in sample.turns:
        num_messages += 2 + len(turn.before)
        num_characters += len(turn.prompt) + len(turn.answer) + len(turn.thought or "")
        for text in turn.calls:
            num_characters += len(text)
        for _, text in turn.before:
            num_characters += len(text)
    num_characters += len(sample.system or "") + len(sample.tools)
    for what, value, option, limit in (
        ("images and videos", len(sample.media), "max_media", max_media),
        ("messages", num_messages, "max_messages", max_messages),
        ("characters", num_characters, "max_text_length", max_text_length),
    ):
        if value > limit:
            raise SampleError(
                "too_costly", f"{value:,} {what} > source.{option} {limit:,}; raise it to read them"
            )


def parse_json(data: bytes) -> Any:
    """Parse JSON; integers beyond 64 bits, which orjson rounds, stay as they are. Raises
    SampleError: too_costly where its values would take more memory than a record's may (each but
    the first follows a comma or an opening bracket), or orjson.JSONDecodeError."""
    if len(data) > MAX_JSON_VALUES:
        num_values = sum(map(data.count, (b",", b"[", b"{")))
        if num_values > MAX_JSON_VALUES:
            raise SampleError(
                "too_costly", f"about {num_values:,} values in the JSON > {MAX_JSON_VALUES:,}"
            )
    found = orjson.loads(data)
    return json.loads(data) if _LONG in data.translate(_DIGITS) else found
