"""Source formats: how samples are found on disk, and read again from where they are.

Takes the options of a source, gives records and the places of their media. May import storage.
A new format is a file in formats/ and a line in SOURCES.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offline_packing.errors import ConfigError
from offline_packing.sources.base import Embedded, Scan, Source, SourcePart, SourceRecord
from offline_packing.sources.formats.energon import EnergonSource
from offline_packing.sources.formats.jsonl import (
    CsvSource,
    JsonlSource,
    JsonSource,
    TextSource,
    TsvSource,
)
from offline_packing.sources.formats.llama_factory import LlamaFactorySource
from offline_packing.sources.formats.packs import PacksSource
from offline_packing.sources.formats.pairs import CaptionsSource, PairsSource
from offline_packing.sources.formats.tables import HuggingFaceSource, ParquetSource
from offline_packing.sources.formats.webdataset import WebDatasetSource
from offline_packing.sources.options import SourceOptions
from offline_packing.sources.reading.locators import Locator
from task_encoders.field_types import invalid

__all__ = [
    "SOURCES",
    "Embedded",
    "Locator",
    "Scan",
    "Source",
    "SourceOptions",
    "SourcePart",
    "SourceRecord",
    "open_source",
    "parse_options",
    "source_class",
]

SOURCES: dict[str, type[Source]] = {
    "pairs": PairsSource,
    "captions": CaptionsSource,
    "json": JsonSource,
    "jsonl": JsonlSource,
    "csv": CsvSource,
    "tsv": TsvSource,
    "webdataset": WebDatasetSource,
    "energon": EnergonSource,
    "llama_factory": LlamaFactorySource,
    "parquet": ParquetSource,
    "huggingface": HuggingFaceSource,
    "text": TextSource,
    "packs": PacksSource,
}


def source_class(name: str) -> type[Source]:
    """Return the class of a name in SOURCES, or of "module:Class". Raises ConfigError if there is
    none."""
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
        raise ConfigError(f"{name!r} is not a subclass of offline_packing.sources.Source")
    return found


def parse_options(content: Any) -> Any:
    """Turn a source's section of the configuration into the options of its format. Raises
    ValidationError (pydantic's) if a field is unknown or has a bad value."""
    if not isinstance(content, Mapping) or not isinstance(content.get("format"), str):
        return content  # the configuration reports the error
    try:
        options = source_class(content["format"]).Options
    except ConfigError as error:
        raise invalid("source", "format", content["format"], str(error)) from error
    known = options.model_fields
    for name in [name for name in content if name not in known]:
        fitting = [key for key, one in SOURCES.items() if name in one.Options.model_fields]
        if not fitting:
            raise invalid("source", name, None, "", kind="extra_forbidden", valid=", ".join(known))
        if content[name]:
            text = f"{name} applies to format {', '.join(fitting)} only; remove it"
            raise invalid("source", name, content[name], text)
    return options.model_validate({name: content[name] for name in content if name in known})


def open_source(
    content: SourceOptions | Mapping[str, Any],
    *,
    key_prefix: str = "",
    unpack_folder: Path | None = None,
) -> Source:
    """Open the source that options, or a mapping of them, describe. Raises StageError if it cannot
    be opened, ValidationError (pydantic's) if a mapping has a wrong value."""
    options = SourceOptions.model_validate(parse_options(content))
    source = source_class(options.format)
    return source(options, key_prefix=key_prefix, unpack_folder=unpack_folder)
