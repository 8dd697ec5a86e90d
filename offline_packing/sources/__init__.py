"""Source formats: how samples are found on disk. A new one is a file here and a line in SOURCES."""

from offline_packing.sources.base import Locator, Scan, Source, SourcePart, SourceRecord
from offline_packing.sources.jsonl import JsonlSource
from offline_packing.sources.pairs import PairsSource

SOURCES: dict[str, type[Source]] = {
    "pairs": PairsSource,
    "jsonl": JsonlSource,
}

__all__ = ["SOURCES", "Locator", "Scan", "Source", "SourcePart", "SourceRecord"]
