"""Where a record keeps what a sample needs, for records with other field names.

    fields: {id: image_id, images: image, caption: "captions[0].content"}

A field on the left is one that `records.to_sample` reads; on the right is its place in the record.
Fields that are not listed keep their default names.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from offline_packing.errors import ConfigError
from offline_packing.sources.records import (
    ANSWER_FIELDS,
    DIALOGUE_FIELDS,
    MEDIA_FIELDS,
    PROMPT_FIELDS,
    RECORD_FIELDS,
)

#: What may stand on the left, and the default names that do not count beside it.
_REPLACED: Final[Mapping[str, tuple[str, ...]]] = {
    "id": ("id",),
    "images": ("images", "image"),
    "videos": ("videos", "video"),
    "messages": DIALOGUE_FIELDS,
    "conversations": DIALOGUE_FIELDS,
    "system": ("system",),
    "question": (*DIALOGUE_FIELDS, *PROMPT_FIELDS),
    "answer": (*DIALOGUE_FIELDS, *ANSWER_FIELDS),
    "caption": (*DIALOGUE_FIELDS, *PROMPT_FIELDS, *ANSWER_FIELDS),
}
CANONICAL_FIELDS: Final = tuple(_REPLACED)

_PATH: Final = re.compile(r"[^.\[\]]+(\[\d+\]|\.[^.\[\]]+)*")
_STEP: Final = re.compile(r"[^.\[\]]+")


class FieldMap:
    """Renames and picks out fields. Without any, a record is left as it is."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        """Raises ConfigError for an unknown field or a place that is not a path."""
        self._steps: dict[str, tuple[str, ...]] = {}
        for name, place in fields.items():
            if name not in CANONICAL_FIELDS:
                raise ConfigError(
                    f"source.fields.{name} is not a known field; valid: "
                    f"{', '.join(CANONICAL_FIELDS)}"
                )
            if not _PATH.fullmatch(place):
                raise ConfigError(
                    f"source.fields.{name}={place!r} is not a path such as captions[0].content"
                )
            self._steps[name] = tuple(_STEP.findall(place))

        replaced = {old for name in self._steps for old in _REPLACED[name]}
        #: default names that are still read
        self._defaults = tuple(name for name in RECORD_FIELDS if name not in replaced)
        self._dropped = replaced | (set(self.named_columns().values()) - set(self._defaults))

    def __bool__(self) -> bool:
        return bool(self._steps)

    def column(self, name: str) -> str | None:
        """The record's own field for a canonical one; None if no place was given."""
        steps = self._steps.get(name)
        return steps[0] if steps else None

    def named_columns(self) -> dict[str, str]:
        """The record's own fields that a place was given for, by canonical field."""
        return {name: steps[0] for name, steps in self._steps.items()}

    def columns(self) -> set[str]:
        """All of the record's own fields that may go into a sample."""
        return {*self.named_columns().values(), *self._defaults}

    def media_columns(self) -> set[str]:
        """The record's own fields that images and videos are taken from."""
        named = {self.column("images"), self.column("videos")} - {None}
        return {*map(str, named), *(set(self._defaults) & MEDIA_FIELDS)}

    def apply(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The record with the named fields under their canonical names; those that it lacks are
        left out."""
        if not self._steps:
            return content
        kept = {name: value for name, value in content.items() if name not in self._dropped}
        found = {name: follow(content, steps) for name, steps in self._steps.items()}
        return kept | {name: value for name, value in found.items() if value is not None}

    def missing(self, content: Mapping[str, Any]) -> list[str]:
        """'source.fields.images=picture' of each place that gave a record nothing.

        Args:
            content: what `apply` gave.
        """
        return [
            f"source.fields.{name}={'.'.join(steps)}"
            for name, steps in self._steps.items()
            if name not in content
        ]


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
