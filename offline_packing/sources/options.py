"""The options of a source: the `source` section of the configuration.

A format declares its own options, besides the common ones, in a subclass, `Source.Options`; the
configuration takes it whole. One of them says where records with other field names keep what a
sample needs:

    fields: {id: image_id, images: image, caption: "captions[0].content"}

A field on the left is one that `records.to_sample` reads; on the right is its place in the record.
Fields that are not listed keep their default names. Where `question` is Alpaca's `instruction`,
its `input` goes with it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
)

from task_encoders.field_types import (
    Count,
    LocalOrRemotePath,
    not_bool,
)
from task_encoders.records.questions import (
    ANSWER_FIELDS,
    DIALOGUE_FIELDS,
    PROMPT_FIELDS,
    with_input,
)
from task_encoders.records.record import MEDIA_FIELDS, RECORD_FIELDS
from task_encoders.samples.limits import MAX_MEDIA, MAX_MESSAGES, MAX_TEXT_LENGTH

#: More copies of a sample than this are taken for a typing error.
MAX_REPEAT: Final = 1000

#: Names on the left of `fields`, and the default names that do not count beside it.
_REPLACED: Final[Mapping[str, tuple[str, ...]]] = {
    "id": ("id",),
    "images": ("images", "image"),
    "videos": ("videos", "video"),
    "messages": DIALOGUE_FIELDS,
    "conversations": DIALOGUE_FIELDS,
    "system": ("system",),
    "tools": ("tools", "functions"),
    "question": (*DIALOGUE_FIELDS, *PROMPT_FIELDS),
    "answer": (*DIALOGUE_FIELDS, *ANSWER_FIELDS),
    "caption": (*DIALOGUE_FIELDS, *PROMPT_FIELDS, *ANSWER_FIELDS),
    "group": (),
}
_PATH: Final = re.compile(r"[^.\[\]]+(\[\d+\]|\.[^.\[\]]+)*")
_STEP: Final = re.compile(r"[^.\[\]]+")


class FieldMap:
    """Renames and picks out fields. Without any, a record is left as it is."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        """Raises ValueError for an unknown field or a place that is not a path."""
        for name, place in fields.items():
            if name not in _REPLACED:
                raise ValueError(
                    f"source.fields.{name} is not a known field; valid: {', '.join(_REPLACED)}"
                )
            if not _PATH.fullmatch(place):
                raise ValueError(
                    f"source.fields.{name}={place!r} is not a path such as captions[0].content"
                )
        self._steps = {name: tuple(_STEP.findall(place)) for name, place in fields.items()}
        #: the record's own fields that a place was given for, by canonical field
        self.named = {name: steps[0] for name, steps in self._steps.items()}
        replaced = {old for name in fields for old in _REPLACED[name]}
        #: default names that are still read
        self._defaults = set(RECORD_FIELDS) - replaced
        self._dropped = replaced | (set(self.named.values()) - self._defaults)
        #: that it is about, beside Alpaca's instruction
        is_alpaca = self._steps.get("question") == ("instruction",)
        self._input = {"input"} - set(self.named.values()) if is_alpaca else set()

    def __bool__(self) -> bool:
        return bool(self._steps)

    def columns(self) -> set[str]:
        """All of the record's own fields that may go into a sample."""
        return {*self.named.values(), *self._defaults, *self._input}

    def media_columns(self) -> set[str]:
        """The record's own fields that images and videos are taken from."""
        named = {self.named[name] for name in ("images", "videos") if name in self.named}
        return named | (self._defaults & MEDIA_FIELDS)

    def apply(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """The record with the named fields, if it has them, under their canonical names."""
        if not self._steps:
            return content
        kept = {name: value for name, value in content.items() if name not in self._dropped}
        found = {name: follow(content, steps) for name, steps in self._steps.items()}
        if (
            self._input
            and isinstance(found["question"], str)
            and isinstance(kept.get("input"), str)
        ):
            found["question"] = with_input(found["question"], kept.pop("input"))
        return kept | {name: value for name, value in found.items() if value is not None}

    def missing(self, content: Mapping[str, Any]) -> list[str]:
        """'source.fields.images=picture' for each place that gave `apply` no value."""
        absent = self._steps.keys() - content.keys() if self._steps else ()
        return [f"source.fields.{name}={'.'.join(self._steps[name])}" for name in sorted(absent)]


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


def listed(value: Any) -> Any:
    """One text as a list with one item."""
    return [value] if isinstance(value, str) else value


def _check_fields(fields: dict[str, str]) -> dict[str, str]:
    FieldMap(fields)
    return fields


class SourceOptions(BaseModel):
    """Options of a source that every format has."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    #: a name in SOURCES, or "module:Class" of a Source of your own
    format: str
    #: a folder or a file, here or of a storage that fsspec knows
    path: LocalOrRemotePath
    #: the task they are trained for
    task: Literal["captioning", "vqa", "bmr"]
    #: put before every key (default: of several sources, the path's last part)
    name: str | None = None
    #: outputs, here or at a URL, whose samples, packed or set aside, are left out
    skip: Annotated[tuple[LocalOrRemotePath, ...], BeforeValidator(listed)] = ()
    #: how often each sample is used; a fraction uses part of the samples once more
    repeat: Annotated[float, BeforeValidator(not_bool), Field(gt=0, le=MAX_REPEAT)] = 1
    #: share of all tokens, in proportion to the other sources' weights
    weight: Annotated[float, BeforeValidator(not_bool), Field(gt=0)] | None = None
    #: the output whose index holds its samples; set by format index
    index: Annotated[LocalOrRemotePath | None, Field(exclude_if=lambda path: path is None)] = None
    #: train answers as captions, without their prompts
    ignore_prompts: bool = False
    #: without images and videos on purpose; captioning and vqa refuse such a source otherwise
    text_only: bool = False
    #: a sample with more characters in its texts is set aside
    max_text_length: Count = MAX_TEXT_LENGTH
    #: a conversation with more messages is set aside
    max_messages: Count = MAX_MESSAGES
    #: a sample with more images and videos is set aside
    max_media: Count = MAX_MEDIA

    def format_options(self) -> dict[str, Any]:
        """Options that samples depend on besides format, path and task, without defaults."""
        fields = type(self).model_fields
        return {k: v for k, v in self if k not in _APART and v != fields[k].default}

    def reads_within(self, other: "SourceOptions") -> bool:
        """Whether another source reads all that this one reads, in the same way."""
        path, around = Path(self.path).resolve(), Path(other.path).resolve()
        same = (self.format, self.format_options()) == (other.format, other.format_options())
        # What two outputs measured of one folder may be apart, by source.skip.
        apart = self.index and other.index and self.index != other.index
        return same and not apart and path.is_relative_to(around)


#: Options that do not change the samples themselves.
_APART: Final = frozenset(
    ("format", "path", "task", "name", "repeat", "weight", "index", "text_only")
)


class FieldOptions(SourceOptions):
    """Options of formats whose records may use other field names."""

    #: places of a sample's fields in a record: {caption: "captions[0].content"}
    fields: Annotated[dict[str, str], AfterValidator(_check_fields)] = {}


class MediaOptions(SourceOptions):
    """Options of formats whose records name files of images and videos."""

    #: image paths are relative to this folder instead of the file's own
    image_root: LocalOrRemotePath | None = None


class FileOptions(FieldOptions, MediaOptions):
    """Both."""
