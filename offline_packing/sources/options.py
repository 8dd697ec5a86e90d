"""The options of a source: the `source` section of the configuration.

A format declares its own options, besides the common ones, in a subclass, `Source.Options`; the
configuration takes it whole. One of them says where records with other field names keep what a
sample needs:

    fields: {id: image_id, images: image, caption: "captions[0].content"}

A field on the left is one of RENAMED (task_encoders/records/forms.py); on the right is its place in
the record. Fields that are not listed keep their default names. Where `question` is Alpaca's
`instruction`, its `input` goes with it. Places of the same form name what `keep` puts into the
index.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from offline_packing.storage.streams import DamagedStreamError
from task_encoders.field_types import IF_ON, Count, LocalOrRemotePath, not_bool
from task_encoders.records.forms import (
    CLIP_FIELDS,
    MEDIA_FIELDS,
    RECORD_FIELDS,
    RENAMED,
    with_input,
)
from task_encoders.records.record import ASKED, RATED
from task_encoders.samples.limits import MAX_MEDIA, MAX_MESSAGES, MAX_TEXT_LENGTH

#: More copies of a sample than this are taken for a typing error.
MAX_REPEAT: Final = 1000

#: Name in a mapped record of what `keep` takes out of it: a `kept_value` by place.
KEPT: Final = "source.keep"
#: Characters of a text that is kept, and the largest integer up to which all are exact as float64.
_MAX_KEPT: Final = 256
_MAX_EXACT: Final = 2**53
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_PATH: Final = re.compile(r"[^.\[\]]+(\[\d+\]|\.[^.\[\]]+)*")
_STEP: Final = re.compile(r"[^.\[\]]+")


class FieldMap:
    """Renames and picks out fields. Without any, a record is left as it is."""

    def __init__(
        self,
        fields: Mapping[str, str],
        keep: Collection[str] = (),
        min_rating: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Check the fields. Raises ValueError for an unknown one, or a place that is not a path."""
        for name in fields:
            if name not in RENAMED:
                raise ValueError(
                    f"source.fields.{name} is not a known field; valid: {', '.join(RENAMED)}"
                )
        self._steps = {name: _steps(f"source.fields.{name}", at) for name, at in fields.items()}
        self._least = min_rating
        places = {KEPT: keep, RATED: min_rating}
        #: places that are read besides those of a sample's fields, by the name of their values
        self.beside = {
            name: {place: _steps(name, place) for place in own}
            for name, own in places.items()
            if own
        }
        #: the record's own fields that a place was given for, by canonical field
        self.named = {name: steps[0] for name, steps in self._steps.items()}
        replaced = {old for name in fields for old in RENAMED[name]}
        #: default names that are still read
        self._defaults = RECORD_FIELDS - replaced
        self._dropped = replaced | (set(self.named.values()) - self._defaults)
        #: whether the question is Alpaca's instruction, which "input" belongs to
        is_alpaca = self._steps.get("question") == ("instruction",)
        self._has_input = is_alpaca and "input" not in self.named.values()
        first = {steps[0] for own in self.beside.values() for steps in own.values()}
        #: the record's own fields that are read for `beside` alone
        self.columns_beside = first - FieldMap.columns(self)

    def __bool__(self) -> bool:
        return bool(self._steps)

    def columns(self) -> set[str]:
        """Return all of the record's own fields that may go into a sample."""
        return {*self.named.values(), *self._defaults}

    def choose(
        self, columns: Sequence[str], ignored: Collection[str] = (), hint: str = ""
    ) -> list[str]:
        """Return those of a table's columns that records are made of. Raises DamagedStreamError
        where there are none, or two of one name."""
        wanted = (self.columns() | self.columns_beside) - set(ignored)
        chosen = [name for name in columns if name in wanted]
        twice = [name for name in chosen if chosen.count(name) > 1]
        if twice:
            raise DamagedStreamError(f"it has {len(twice)} columns named {twice[0]!r}; rename them")
        absent = [f"{name}={at}" for name, at in self.named.items() if at not in chosen]
        if absent or not set(chosen) - {"id", self.named.get("id")} - self.columns_beside:
            problem = f" (no {absent[0]})" if absent else ""
            raise DamagedStreamError(
                f"it has the columns {', '.join(columns)}; {hint}name those to be used{problem}, "
                "for example source.fields={images: jpg, caption: text}"
            )
        return chosen

    def media_columns(self) -> set[str]:
        """Return the record's own fields that images and videos are taken from."""
        named = {self.named[name] for name in ("images", "videos") if name in self.named}
        return named | (self._defaults & MEDIA_FIELDS)

    def apply(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the record with the named fields, if it has them, under their canonical names, and
        with KEPT and RATED if these are asked for."""
        if not (self._steps or self.beside):
            return content
        kept = {name: value for name, value in content.items() if name not in self._dropped}
        found = {name: follow(content, steps) for name, steps in self._steps.items()}
        if (
            self._has_input
            and isinstance(found["question"], str)
            and isinstance(kept.get("input"), str)
        ):
            found["question"] = with_input(found["question"], kept.pop("input"))
        for name, places in self.beside.items():
            values = ((at, follow(content, steps)) for at, steps in places.items())
            found[name] = {
                at: kept_value(value) if name == KEPT else (value, self._least[at])
                for at, value in values
                if value is not None
            }
        if asked := {name: found.pop(name) for name in CLIP_FIELDS if found.get(name) is not None}:
            found[ASKED] = asked
        return kept | {name: value for name, value in found.items() if value is not None}

    def missing(self, content: Mapping[str, Any]) -> list[str]:
        """List each place that gave `apply` no value, as 'source.fields.images=picture'."""
        found = content.keys() | content.get(ASKED, {}).keys() if self._steps else ()
        absent = self._steps.keys() - found
        places = [f"source.fields.{name}={'.'.join(self._steps[name])}" for name in sorted(absent)]
        for name, own in self.beside.items():
            form = " (a number or a short text)" if name == KEPT else ""
            given = content.get(name, {})
            places += [f"{name}={at}{form}" for at in own if given.get(at) is None]
        return places


def _steps(option: str, place: str) -> tuple[str, ...]:
    if not _PATH.fullmatch(place):
        raise ValueError(f"{option}={place!r} is not a path such as captions[0].content")
    return tuple(_STEP.findall(place))


def kept_value(value: Any) -> dict[str, float | str | None] | None:
    """Return {number, text} of a number, true or false (1 or 0), or a text of at most 256
    characters; None of anything else. A text that spells a number has both, an integer above 2⁵³
    its digits."""
    if isinstance(value, int) and abs(value) > _MAX_EXACT:
        return {"number": None, "text": str(value)}
    if isinstance(value, int | float):
        return {"number": float(value), "text": None}
    if not isinstance(value, str) or len(value) > _MAX_KEPT:
        return None
    number = float(value) if _NUMBER.fullmatch(value) else math.inf
    return {"number": number if math.isfinite(number) else None, "text": value}


def follow(value: Any, steps: tuple[str, ...]) -> Any:
    """Follow steps into a value: ('captions', '0', 'content') -> value['captions'][0]['content'],
    or None."""
    for step in steps:
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def listed(value: Any) -> Any:
    """Put one text or mapping into a list."""
    return [value] if isinstance(value, str | Mapping) else value


#: An item of `skip`: an output, or {trained: output.path of a training run}.
_Trained = Annotated[dict[Literal["trained"], LocalOrRemotePath], Field(min_length=1), Tag("run")]
_Skipped = Annotated[
    Annotated[LocalOrRemotePath, Tag("output")] | _Trained,
    Discriminator(lambda one: "output" if isinstance(one, str) else "run"),
]


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
    #: outputs, here or at a URL, whose samples, packed or set aside, are left out; not those that
    #: the outputs left out on purpose, or as overlong for shorter packs. {trained: RUN} leaves out
    #: what a run of launch.train or launch.train_transformers trained before this is planned
    skip: Annotated[tuple[_Skipped, ...], BeforeValidator(listed)] = ()
    #: how often each sample is used; a fraction uses part of the samples once more
    repeat: Annotated[float, BeforeValidator(not_bool), Field(gt=0, le=MAX_REPEAT)] = 1
    #: share of all tokens, in proportion to the other sources' weights
    weight: Annotated[float, BeforeValidator(not_bool), Field(gt=0)] | None = None
    #: the output whose index holds its samples; set by format index
    index: Annotated[LocalOrRemotePath | None, IF_ON] = None
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
        """Return the options that samples depend on, besides format, path and task, without
        defaults."""
        fields = type(self).model_fields
        own = {k: v for k, v in self if k not in APART and v != fields[k].default}
        return own | ({"skip": self.outputs_skipped} if self.outputs_skipped else {})

    @property
    def outputs_skipped(self) -> tuple[str, ...]:
        """The outputs of `skip`."""
        return tuple(one for one in self.skip if isinstance(one, str))

    @property
    def trained_by(self) -> tuple[str, ...]:
        """The training runs of `skip`."""
        return tuple(one["trained"] for one in self.skip if not isinstance(one, str))

    def reads_within(self, other: "SourceOptions") -> bool:
        """Tell whether another source reads all that this one reads, in the same way."""
        path, around = Path(self.path).resolve(), Path(other.path).resolve()
        same = (self.format, self.format_options()) == (other.format, other.format_options())
        # What two outputs measured of one folder may be apart, by source.skip.
        indexes = {Path(one.index).resolve() for one in (self, other) if one.index}
        return same and len(indexes) < 2 and path.is_relative_to(around)


#: Options that do not change the samples themselves.
APART: Final = frozenset(
    ("format", "path", "task", "name", "skip", "repeat", "weight", "index", "text_only")
)


class FieldOptions(SourceOptions):
    """Options of formats whose records may use other field names."""

    #: places of a sample's fields in a record: {caption: "captions[0].content"}
    fields: dict[str, str] = {}
    #: places of numbers and short texts in a record that the index keeps, for pack.where:
    #: [relevance_min, meta.source]
    keep: Annotated[tuple[str, ...], BeforeValidator(listed), IF_ON] = ()
    #: leave out turns whose entry in a list of ratings, one for each turn, is lower; their images
    #: and videos stay: {relevance_ratings: 3}
    min_rating: Annotated[dict[str, float], IF_ON] = {}

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        FieldMap(self.fields, self.keep, self.min_rating)
        return self


class MediaOptions(SourceOptions):
    """Options of formats whose records name files of images and videos."""

    #: image paths are relative to this folder instead of the file's own
    image_root: LocalOrRemotePath | None = None


class FileOptions(FieldOptions, MediaOptions):
    """Both."""


def place_of(source: Mapping[str, Any]) -> tuple[object, ...]:
    """Return where the samples of a source are, from its options: equal for sources of one
    place."""
    path = str(source["path"])
    path = path if "://" in path else str(Path(path).resolve())
    split = source.get("split") or "train"
    return (source["format"], path.rstrip("/"), split, source.get("dataset"))
