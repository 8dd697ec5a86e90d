"""Types of fields of pydantic models: numbers that are not booleans, names, paths."""

import os
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

_MAX_INTEGER: Final = 2**63 - 1


def not_bool(value: Any) -> Any:
    """A check before pydantic's own, which would read true as 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


def added(default: Any, **extra: Any) -> Any:
    """A field that is stored only where it differs from its default, so that artifacts written
    before it existed stay valid."""
    return Field(default, exclude_if=lambda value: value == default, **extra)


def one_of(registry: Collection[str]) -> AfterValidator:
    """A check that a value is a name in a registry."""

    def check(name: str) -> str:
        if name not in registry:
            raise ValueError(f"not a known name; choose one of: {', '.join(registry)}")
        return name

    return AfterValidator(check)


def _expand_user(path: Any) -> Any:
    if isinstance(path, str) and path.startswith("~"):
        expanded = os.path.expanduser(path)
        if expanded.startswith("~"):  # pyarrow would expand it, where others do not
            raise ValueError(f"{path!r} names no home folder; write the path out")
        return expanded
    return path


def _local(path: str) -> str:
    if "://" in path:
        raise ValueError("a local folder is needed; name one, and copy it from or to the storage")
    return path


def _pairs(values: Any) -> Any:
    return tuple(sorted(values.items())) if isinstance(values, Mapping) else values


#: A mapping, kept as pairs so that it has a hash.
Values = Annotated[
    tuple[tuple[str, bool | int | float | str], ...], BeforeValidator(_pairs), PlainSerializer(dict)
]
LocalOrRemotePath = Annotated[str, BeforeValidator(_expand_user)]
LocalPath = Annotated[LocalOrRemotePath, AfterValidator(_local)]
Count = Annotated[int, BeforeValidator(not_bool), Field(ge=1, le=_MAX_INTEGER)]
NonNegative = Annotated[int, BeforeValidator(not_bool), Field(ge=0, le=_MAX_INTEGER)]
Number = Annotated[float, BeforeValidator(not_bool), Field(ge=0)]
