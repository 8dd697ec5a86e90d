"""Where a record keeps what a sample needs, for records of a form of their own.

    fields: {id: image_id, images: image, caption: "captions[0].content"}

A field on the left is one that `records.to_sample` reads; on the right is its place in the record.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from offline_packing.errors import ConfigError

#: What may stand on the left.
CANONICAL_FIELDS: Final = (
    "id",
    "images",
    "videos",
    "messages",
    "conversations",
    "system",
    "question",
    "answer",
    "caption",
)

_PATH: Final = re.compile(r"[^.\[\]]+(\[\d+\]|\.[^.\[\]]+)*")
_STEP: Final = re.compile(r"[^.\[\]]+")


class FieldMap:
    """Renames and picks out fields. Without any, a record is left as it is."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        """Raises ConfigError for an unknown field or a place that is no path."""
        self._steps: dict[str, tuple[str, ...]] = {}
        for name, place in fields.items():
            if name not in CANONICAL_FIELDS:
                raise ConfigError(
                    f"source.fields.{name} is no known field; valid: {', '.join(CANONICAL_FIELDS)}"
                )
            if not _PATH.fullmatch(place):
                raise ConfigError(
                    f"source.fields.{name}={place!r} is no path such as captions[0].content"
                )
            self._steps[name] = tuple(_STEP.findall(place))

    def __bool__(self) -> bool:
        return bool(self._steps)

    def column(self, name: str) -> str | None:
        """The record's own field that holds a canonical one; None where no place was given."""
        steps = self._steps.get(name)
        return steps[0] if steps else None

    def columns(self) -> set[str]:
        """All of the record's own fields that any canonical one is taken from."""
        return {steps[0] for steps in self._steps.values()}

    def media_columns(self) -> set[str]:
        """The record's own fields that images and videos are taken from."""
        if not self._steps:
            return {"image", "images", "video", "videos"}
        places = (self.column(name) for name in ("images", "videos"))
        return {place for place in places if place is not None}

    def apply(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The record with nothing but the named fields; those that it has not are left out."""
        if not self._steps:
            return content
        found = {name: follow(content, steps) for name, steps in self._steps.items()}
        return {name: value for name, value in found.items() if value is not None}


def follow(value: Any, steps: tuple[str, ...]) -> Any:
    """('captions', '0', 'content') -> value['captions'][0]['content'], or None."""
    for step in steps:
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value
