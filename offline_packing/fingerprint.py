"""Fingerprints tie the artifacts of one output together.

A fingerprint is a flat mapping from a field's name to its value. An artifact made under another
fingerprint is refused by the name of the field that changed. Versions of libraries only warn.
"""

import importlib.metadata
import logging
from collections.abc import Collection, Mapping

from offline_packing.errors import ConfigError, StageError

logger = logging.getLogger(__name__)

Fingerprint = Mapping[str, str | int]

#: Packages whose version may change tokens, sizes or bytes.
_LIBRARIES = ("numpy", "orjson", "pillow", "pyarrow", "tiktoken")


def changed_fields(found: Fingerprint, wanted: Fingerprint) -> list[str]:
    """Names of the fields that differ, those present on one side only included."""
    return sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))


def check_fingerprint(
    found: Fingerprint,
    wanted: Fingerprint,
    *,
    artifact: str,
    remedy: str,
    accept: Collection[str] = (),
) -> None:
    """Raise StageError if any field but the accepted ones differs.

    Args:
        found: what the artifact was made with.
        wanted: what the configuration says now.
        artifact: what to call it in the message.
        remedy: what the user can do.
        accept: names of fields that may differ.
    """
    unknown = set(accept) - {*found, *wanted}
    if unknown:
        raise ConfigError(
            f"--accept-mismatch {min(unknown)}: no such field; valid: {', '.join(sorted(wanted))}"
        )
    names = [name for name in changed_fields(found, wanted) if name not in accept]
    if names:
        values = "; ".join(
            f"{name} was {found.get(name)!r}, is {wanted.get(name)!r}" for name in names
        )
        raise StageError(f"{artifact} was made otherwise: {values}; {remedy}")


def library_versions() -> dict[str, str]:
    """Versions of the libraries that take part, and of this package."""
    names = ("offline-packing", *_LIBRARIES)
    return {name: importlib.metadata.version(name) for name in names}


def warn_of_versions(found: Mapping[str, str], artifact: str) -> None:
    """Log which libraries have another version than when an artifact was made."""
    for name, version in library_versions().items():
        if found.get(name, version) != version:
            logger.warning("%s was made with %s %s, now %s", artifact, name, found[name], version)
