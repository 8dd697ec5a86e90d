"""Bounds on the frames that the boxes of an MP4 or MOV file claim: libavformat believes them.

Source: ISO/IEC 14496-12, and Apple's QuickTime file format for compressed movie resources.
"""

import io
import os
import struct
import zlib
from typing import BinaryIO, Final

from task_encoders.samples import SampleError

#: Boxes in one another: six in real files.
_MAX_DEPTH: Final = 32
#: Boxes of boxes, and where those that list frames have their number.
_CONTAINERS: Final = frozenset(
    (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf", b"cmov")
)
_COUNTS: Final = {b"stsz": 16, b"stz2": 16, b"trun": 12}
#: Packets of a sound track that are listed one by one: 47 a second of AAC.
_MAX_SOUND_PACKETS: Final = 1 << 23
#: A compressed index, unpacked.
_MAX_UNPACKED: Final = 16 << 20


def check_claims(file: BinaryIO, most: int, *, is_unpacked: bool = False) -> None:
    """Raise SampleError: video_too_long where the tables of a file claim more than `most` frames,
    or it has more boxes: libavformat takes 40 bytes for each of these before any frame is read.
    `is_unpacked`: of an index that was compressed, which holds no other."""
    pending = [(0, file.seek(0, os.SEEK_END))]
    num_boxes = num_frames = num_sounds = 0
    handler = b""
    while pending:
        offset, end = pending.pop()
        file.seek(offset)
        head = file.read(20)
        if offset + 8 > end or len(head) < 8:
            continue
        kind, length, header_size = _box(head, end - offset)
        num_boxes += 1
        if kind == b"hdlr":
            handler = head[16:20]
        elif kind == b"cmvd":
            if is_unpacked:
                raise SampleError("video_too_long", "a compressed index within another")
            _check_packed(file, offset + 12, min(offset + length, end), most)
        elif kind in _COUNTS:
            count = int.from_bytes(head[_COUNTS[kind] : _COUNTS[kind] + 4], "big")
            if kind == b"trun" or handler != b"soun":
                num_frames += count
            elif kind == b"stz2" or not any(head[12:16]):  # others, of one size, are not listed
                num_sounds += count
        if max(num_boxes, num_frames) > most or num_sounds > _MAX_SOUND_PACKETS:
            problem = f"{num_frames:,} frames in {num_boxes:,} boxes > {most:,}"
            sounds = f"{num_sounds:,} packets of sound > {_MAX_SOUND_PACKETS:,}"
            raise SampleError("video_too_long", sounds if num_sounds > most else problem)
        if length >= header_size:
            pending.append((offset + length, end))
            if kind in _CONTAINERS and len(pending) < _MAX_DEPTH:
                pending.append((offset + header_size, min(offset + length, end)))


def _box(head: bytes, left: int) -> tuple[bytes, int, int]:
    """Kind of a box, its length (0: all that is left) and that of its header."""
    length, kind = struct.unpack_from(">I4s", head)
    if length == 1 and len(head) >= 16:
        return kind, struct.unpack_from(">Q", head, 8)[0] or left, 16
    return kind, length or left, 8


def _check_packed(file: BinaryIO, start: int, end: int, most: int) -> None:
    """Check the claims of a compressed index, which is unpacked up to a bound."""
    file.seek(start)
    try:
        unpacked = zlib.decompressobj().decompress(file.read(end - start), _MAX_UNPACKED + 1)
    except zlib.error:
        return  # libavformat refuses it, too
    if len(unpacked) > _MAX_UNPACKED:
        raise SampleError(
            "video_too_long", f"a compressed index of more than {_MAX_UNPACKED:,} bytes"
        )
    check_claims(io.BytesIO(unpacked), most, is_unpacked=True)
