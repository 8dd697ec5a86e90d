"""Source formats: how samples are found on disk, and read again from where they lie.

Takes the options of a source, gives records and the places of their media. May import storage.
"""

from offline_packing.sources.base import Source
from offline_packing.sources.options import SourceOptions
from offline_packing.sources.protocol import (
    Embedded,
    Growth,
    Scan,
    SourcePart,
    SourceRecord,
    Stretch,
)
from offline_packing.sources.reading.locators import Locator
from offline_packing.sources.registry import SOURCES, open_source, parse_options, source_class

__all__ = [
    "SOURCES",
    "Embedded",
    "Growth",
    "Locator",
    "Scan",
    "Source",
    "SourceOptions",
    "SourcePart",
    "SourceRecord",
    "Stretch",
    "open_source",
    "parse_options",
    "source_class",
]
