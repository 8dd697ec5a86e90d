"""A source format of your own: CSV files with the columns image, question and answer.

    source: {format: "examples.csv_source:CsvSource", path: data/vqa.csv, task: vqa}

The class must be importable where the pipeline runs (installed, or on PYTHONPATH). It says how the
source is split into parts, and what the records of a part are. The rest is done for it: images are
found below the source's folder, bad records set aside, packs written from the locators.
"""

import csv
from collections.abc import Iterator, Mapping
from typing import Any

from offline_packing.sources import Locator, Scan, Source, SourcePart, SourceRecord
from offline_packing.storage.files import hash_bytes
from task_encoders.samples import SampleError

COLUMNS = ("image", "question", "answer")


class CsvSource(Source):
    """One record per line, without a header line and without line breaks in a field."""

    def scan(self, samples_per_part: int) -> Scan:
        """Parts are ranges of lines, as (offset, bytes of each line)."""
        with self.open_container(str(self.file_name)) as file:
            data = file.read()
        parts, offset = [], 0
        lines = data.splitlines(keepends=True)
        for start in range(0, len(lines), samples_per_part):
            sizes = [len(line) for line in lines[start : start + samples_per_part]]
            parts.append(SourcePart((offset, sizes), len(sizes)))
            offset += sum(sizes)
        return Scan(tuple(parts), hash_bytes(data))

    def records(self, part: SourcePart) -> Iterator[SourceRecord]:
        """Each line, with a locator that finds it again when packs are written."""
        offset, sizes = part.items
        for size in sizes:
            locator = Locator("bytes", str(self.file_name), offset, size)
            data = self.root.read_range(locator.container, offset, size, whole=False)
            key = f"{self.file_name}@{offset}"
            try:
                yield SourceRecord(key, locator, self.parse(data))
            except SampleError as error:  # it is set aside with this reason
                yield SourceRecord(key, locator, error)
            offset += size

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        """A line as a record; its fields have the names of the JSON forms."""
        try:
            (row,) = csv.reader([data.decode()])
        except (UnicodeDecodeError, csv.Error, ValueError) as error:
            raise SampleError("bad_record", str(error)) from error
        if len(row) != len(COLUMNS):
            raise SampleError("bad_record", f"{len(row)} fields, expected {', '.join(COLUMNS)}")
        return dict(zip(COLUMNS, row, strict=True))
