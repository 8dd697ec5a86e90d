"""Frames that the boxes of a file claim."""

import io
import struct
import zlib

import pytest

from task_encoders.media.mp4_claims import check_claims
from task_encoders.samples import SampleError


def box(kind: bytes, *content: bytes) -> bytes:
    data = b"".join(content)
    return struct.pack(">I4s", 8 + len(data), kind) + data


def table(kind: bytes, size: int, count: int) -> bytes:
    """A track of sound or pictures whose samples have one size, or are listed (0)."""
    handler = box(b"hdlr", bytes(8), kind, bytes(12))
    sizes = box(b"stsz", bytes(4), struct.pack(">II", size, count))
    return box(b"trak", box(b"mdia", handler, box(b"minf", box(b"stbl", sizes))))


def test_claims_of_sound_and_of_compressed_indices() -> None:
    many = 1 << 26
    for movie in (table(b"soun", 2, many), table(b"soun", 0, 5000), table(b"vide", 1, 900)):
        check_claims(io.BytesIO(box(b"moov", movie)), 1000)
    packed = box(b"cmvd", bytes(4), zlib.compress(box(b"moov", table(b"vide", 1, many))))
    within = box(b"cmvd", bytes(4), zlib.compress(box(b"moov", box(b"cmov", packed))))
    zeros = box(b"cmvd", bytes(4), zlib.compress(bytes(17 << 20)))
    for movie, problem in (
        (table(b"soun", 0, many), "67,108,864 packets of sound > 8,388,608"),
        (box(b"cmov", packed), "67,108,864 frames in"),
        (box(b"cmov", within), "a compressed index within another"),
        (box(b"cmov", zeros), "a compressed index of more than 16,777,216 bytes"),
    ):
        with pytest.raises(SampleError, match=f"video_too_long: {problem}"):
            check_claims(io.BytesIO(box(b"moov", movie)), 1000)
    check_claims(io.BytesIO(box(b"moov", box(b"cmov", box(b"cmvd", bytes(20))))), 1000)
