"""JSON Lines: one record per line, with the names of its images.

    {"id": "a-17", "messages": [...], "images": ["images/17.jpg"]}

The path is one file, or a folder of which every `*.jsonl` is read. A record's key is its "id" (text
or a whole number), or else `FILE:LINE`, lines counted from 1. Blank lines are no records.
"""

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from offline_packing.errors import StageError
from offline_packing.sources.base import MAX_JSON_BYTES, Locator, Scan, Source, SourcePart
from offline_packing.sources.base import SourceRecord as Record
from offline_packing.sources.records import load_json
from task_encoders.samples import SampleError

_BLOCK: Final = 8 << 20


class JsonlSource(Source):
    """Records by their byte range in a file. A part is (container, begin, end, first line)."""

    def scan(self, samples_per_part: int) -> Scan:
        digest = xxhash.xxh3_128()
        parts: list[SourcePart] = []
        for container in self._containers():
            digest.update(os.fsencode(container) + b"\0")
            cuts, num_lines = _cut_lines(self.root.path(container), samples_per_part, digest)
            for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
                first_line = i * samples_per_part
                lines = min(samples_per_part, num_lines - first_line)
                parts.append(SourcePart((container, begin, end, first_line + 1), lines))
        return Scan(tuple(parts), digest.hexdigest())

    def records(self, part: SourcePart) -> Iterator[Record]:
        container, begin, end, first_line = part.items
        stem = container.removesuffix(".jsonl")
        with open(self.root.path(container), "rb") as file:
            file.seek(begin)
            line_number = first_line
            while (offset := file.tell()) < end:
                line = rest = file.readline(MAX_JSON_BYTES)
                while len(rest) == MAX_JSON_BYTES and not rest.endswith(b"\n"):
                    rest = file.readline(MAX_JSON_BYTES)
                too_long = rest is not line
                if line.strip():
                    locator = Locator("bytes", container, offset, len(line))
                    yield _record(f"{stem}:{line_number}", locator, line, too_long=too_long)
                line_number += 1

    def _containers(self) -> list[str]:
        if self.path.is_file():
            return [self.path.name]
        root = Path(self.root.folder)
        found = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.jsonl"))
        if not found:
            raise StageError(f"source path {str(self.path)!r} holds no *.jsonl; set source.path")
        return found


def _record(key: str, locator: Locator, line: bytes, *, too_long: bool) -> Record:
    try:
        if too_long:
            raise SampleError("bad_record", f"the line is longer than {MAX_JSON_BYTES} bytes")
        content = load_json(line)
    except SampleError as error:
        return Record(key, locator, error)
    return Record(_record_key(content, key), locator, content)


def _record_key(content: Mapping[str, Any], default: str) -> str:
    identity = content.get("id")
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        return default
    return str(identity)


def _cut_lines(path: str, lines_per_part: int, digest: "xxhash.xxh3_128") -> tuple[list[int], int]:
    """Offsets at which parts of `lines_per_part` lines begin, and the file's size; number of lines.

    The content goes into the digest on the way.
    """
    cuts, num_lines, offset, last = [0], 0, 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + offset + 1
            # Line `num_lines + j` ends at ends[j]; every lines_per_part-th one closes a part.
            cuts += ends[(-num_lines - 1) % lines_per_part :: lines_per_part].tolist()
            num_lines += len(ends)
            offset += len(block)
            last = block[-1:]
    num_lines += last != b"\n"
    return (cuts if cuts[-1] == offset else [*cuts, offset]), num_lines
