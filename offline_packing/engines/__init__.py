"""Engines: what runs a stage's tasks. A new one is a file here and a line in ENGINES."""

from offline_packing.engines.base import Engine
from offline_packing.engines.local import LocalEngine

ENGINES: dict[str, type[Engine]] = {
    "local": LocalEngine,
}

__all__ = ["ENGINES", "Engine"]
