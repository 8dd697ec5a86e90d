"""Source formats: how samples are found on disk. A new one is a file here and a line in SOURCES."""

import importlib

from offline_packing.errors import ConfigError
from offline_packing.sources.base import (
    Embedded,
    Growth,
    Scan,
    Source,
    SourcePart,
    SourceRecord,
    Stretch,
)
from offline_packing.sources.formats.energon import EnergonSource
from offline_packing.sources.formats.jsonl import JsonlSource, JsonSource
from offline_packing.sources.formats.llama_factory import LlamaFactorySource
from offline_packing.sources.formats.packs import PacksSource
from offline_packing.sources.formats.pairs import PairsSource
from offline_packing.sources.formats.tables import HuggingFaceSource, ParquetSource
from offline_packing.sources.formats.webdataset import WebDatasetSource
from offline_packing.sources.reading.locators import Locator

SOURCES: dict[str, type[Source]] = {
    "pairs": PairsSource,
    "json": JsonSource,
    "jsonl": JsonlSource,
    "webdataset": WebDatasetSource,
    "energon": EnergonSource,
    "llama_factory": LlamaFactorySource,
    "parquet": ParquetSource,
    "huggingface": HuggingFaceSource,
    "packs": PacksSource,
}

__all__ = [
    "SOURCES",
    "Embedded",
    "Growth",
    "Locator",
    "Scan",
    "Source",
    "SourcePart",
    "SourceRecord",
    "Stretch",
    "source_class",
]


def source_class(name: str) -> type[Source]:
    """The class of a format: a name in SOURCES, or "module:Class" of one that is installed.

    Raises:
        ConfigError: there is none.
    """
    if name in SOURCES:
        return SOURCES[name]
    module, separator, class_name = name.partition(":")
    if not separator:
        raise ConfigError(
            f"not a known name; choose one of: {', '.join(SOURCES)}, or module:Class of your own"
        )
    try:
        found = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be imported: {error}; install it") from error
    if not (isinstance(found, type) and issubclass(found, Source)):
        raise ConfigError(f"{name!r} is no subclass of offline_packing.sources.Source")
    return found
