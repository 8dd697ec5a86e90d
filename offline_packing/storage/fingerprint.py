"""Fingerprints tie the artifacts of one output together.

A fingerprint is a flat mapping from a field's name to its value. An artifact made under another
fingerprint is refused by the name of the field that changed. Versions of libraries only warn.
"""

import importlib.metadata
import json
import logging
from collections.abc import Callable, Collection, Mapping

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
    explain: Callable[[str], str | None] = lambda name: None,
) -> None:
    """Raise StageError if any field but the accepted ones differs.

    Args:
        found: what the artifact was made with.
        wanted: what the configuration says now.
        artifact: what to call it in the message.
        remedy: what the user can do.
        accept: names of fields that may differ.
        explain: what changed, of a field whose values say nothing to people; None of others.
    """
    unknown = set(accept) - {*found, *wanted}
    if unknown:
        raise ConfigError(
            f"--accept-mismatch {min(unknown)}: no such field; valid: {', '.join(sorted(wanted))}"
        )
    names = [name for name in changed_fields(found, wanted) if name not in accept]
    if names:
        changes = "; ".join(
            explain(name) or f"{name} was {_shown(name, found)}, is {_shown(name, wanted)}"
            for name in names
        )
        raise StageError(f"{artifact} cannot be used: {changes}; {remedy}")


def _shown(name: str, fingerprint: Fingerprint) -> str:
    """A value on one line; what is neither text nor an integer stands in a fingerprint as JSON."""
    if name not in fingerprint:
        return "not set"
    value = fingerprint[name]
    if isinstance(value, str) and value.endswith("\n"):
        return json.dumps(json.loads(value), ensure_ascii=False)
    return repr(value)


def library_versions() -> dict[str, str]:
    """Versions of the libraries involved, and of this package."""
    names = ("offline-packing", *_LIBRARIES)
    return {name: importlib.metadata.version(name) for name in names}


def warn_of_versions(found: Mapping[str, str], artifact: str) -> None:
    """Log which libraries have another version than when an artifact was made."""
    for name, version in library_versions().items():
        if found.get(name, version) != version:
            logger.warning("%s was made with %s %s, now %s", artifact, name, found[name], version)
