"""The receipt of a stage: its inputs, its files and its figures. A stage is complete while its
receipt is there.

_packing/STAGE.json             written last
_packing/copies/STAGE.json      written before it: a lost receipt is restored from it
_packing/STAGE.started.json     inputs of a stage that is not complete: parts of two settings are
                                never mixed

Inputs map names of fields to plain values. An earlier stage is an input by the hash of its files.
Versions of libraries are not inputs: a change only warns.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from offline_packing.errors import ConfigError, DamagedError, StageError
from offline_packing.storage.files import hash_bytes, read_json, seal, to_json, write_atomically
from task_encoders.field_types import NonNegative
from task_encoders.packs.manifest import FileName
from task_encoders.storage.paths import REMEDY

logger = logging.getLogger(__name__)

#: The stages in their order; each is made from the ones before it.
STAGES: Final = ("measure", "plan", "write", "verify")

Setting = str | int | bool
#: Settings by name.
Fingerprint = Mapping[str, Setting]


def receipt_path(packing: Path, stage: str) -> Path:
    """Return the path of a receipt in the folder `_packing`."""
    return packing / f"{stage}.json"


def copy_path(packing: Path, stage: str) -> Path:
    """Return the path of a receipt's copy."""
    return packing / "copies" / f"{stage}.json"


def started_path(packing: Path, stage: str) -> Path:
    """Return the path of the inputs of a stage that is not complete."""
    return packing / f"{stage}.started.json"


@dataclass(frozen=True)
class Receipt:
    """Inputs, files and figures of a complete stage."""

    inputs: dict[str, Setting]
    #: xxh3_128 of each file, by its name relative to the output
    files: dict[FileName, str]
    #: figures that later stages, messages and the report use
    facts: dict[str, Any]

    def save(self, packing: Path, stage: str) -> Self:
        """Write the receipt, and its copy before it: from now on the stage is complete."""
        path, copy = receipt_path(packing, stage), copy_path(packing, stage)
        content = to_json(seal(asdict(self)))
        if path.is_file():
            path.unlink()  # never one that differs from the copy
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(copy, content)
        started_path(packing, stage).unlink(missing_ok=True)
        write_atomically(path, content)
        return self


def hash_of(files: Mapping[str, str]) -> str:
    """Hash all files of a stage, given their hashes."""
    return hash_bytes(to_json(files))


def load_receipt(packing: Path, stage: str, form: Any = Receipt) -> Any:
    """Return a stage's receipt as `form`, a type that pydantic knows; None: the stage is not
    complete. Raises DamagedError if it is not as it was written, or has another form."""
    return read_json(receipt_path(packing, stage), form=form)


def restore_receipt(packing: Path, stage: str, *, writes: bool = True) -> Receipt | None:
    """Return the receipt of a stage, or its copy; write the lost one of the two. Raises
    DamagedError if one is not as it was written, or they differ."""
    path, copy = receipt_path(packing, stage), copy_path(packing, stage)
    found, other = (read_json(one, form=Receipt) for one in (path, copy))
    if found and other and found != other:
        raise DamagedError(f"{path} is damaged: it differs from its copy; {REMEDY}")
    restored: Receipt | None = found or other
    if restored and writes and not (found and other):
        source, target = (path, copy) if found else (copy, path)
        logger.info("%s: %s is written again", stage, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        started_path(packing, stage).unlink(missing_ok=True)  # killed before the receipt
        write_atomically(target, source.read_bytes())
    return restored


@dataclass(frozen=True)
class Started:
    """Inputs of a stage that is not complete."""

    inputs: dict[str, Setting]
    #: the amounts to make by what is counted; None: unknown
    total: dict[str, NonNegative | None] = field(default_factory=dict)

    def save(self, packing: Path, stage: str) -> None:
        """Write the inputs before the stage's first task."""
        path, content = started_path(packing, stage), to_json(seal(asdict(self)))
        if not path.is_file() or path.read_bytes() != content:  # several ranks write the same
            packing.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)

    @classmethod
    def load(cls, packing: Path, stage: str) -> "Started | None":
        """Read the inputs of a stage; None: it is complete, or was never started."""
        found: Started | None = read_json(started_path(packing, stage), form=cls)
        return found


def changed_fields(found: Fingerprint, wanted: Fingerprint) -> list[str]:
    """Return the names of the fields that differ or exist on one side only."""
    return sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))


def check_inputs(
    found: Fingerprint,
    wanted: Fingerprint,
    *,
    artifact: str,
    remedy: str,
    accept: Collection[str] = (),
    explain: Callable[[str], str | None] = lambda name: None,
) -> None:
    """Raise StageError if any field but the accepted ones differs between what an artifact was made
    with and what is asked for. `explain(name)` describes a change in words, or returns None to show
    the two values."""
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
    """Return a value on one line; values other than text and integers are stored as JSON."""
    if name not in fingerprint:
        return "not set"
    value = fingerprint[name]
    if isinstance(value, str) and value.endswith("\n"):
        return json.dumps(json.loads(value), ensure_ascii=False)
    return repr(value)
