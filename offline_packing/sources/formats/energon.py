"""Datasets that are prepared for Megatron-Energon: captioning, VQA and crude ones, and
Megatron-Bridge's dialogues.

    .nv-meta/dataset.yaml   sample_type: {__module__: megatron.energon, __class__: CaptioningSample}
                            field_map: {image: jpg, caption: "json[caption]"}
    .nv-meta/split.yaml     which tars belong to which split: {train: ["a-{00..07}.tar"]}, and what
                            is excluded: exclude: [a-03.tar, "a-04.tar/0017"]

    __class__: ChatMLWebdataset     of Bridge, whose loader's class is read by name and not run
    field_map: {imgs: image.png, conversation: conversation.json}

A VQA sample gives its answer with the largest weight, without weights the first. A crude dataset,
whose meaning is in the trainer's own code, is read as plain WebDataset. A `sample_loader` is code
as well, and is not run.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import xxhash
from braceexpand import braceexpand

from offline_packing.errors import ConfigError, StageError
from offline_packing.sources.base import Scan, SourceRecord
from offline_packing.sources.formats.webdataset import TarSample, WebDatasetSource, find_part
from offline_packing.sources.options import SourceOptions, follow
from offline_packing.sources.reading.contents import file_names, holds_packs
from offline_packing.sources.roots.listing import walk
from offline_packing.storage.files import to_json
from offline_packing.storage.yaml_file import parse_yaml
from task_encoders.records.forms import best_answer
from task_encoders.records.record import decode_text, load_json
from task_encoders.samples import SampleError

logger = logging.getLogger(__name__)

#: Fields of Energon's sample types, and their names in a record.
_SAMPLE_TYPES: Final[Mapping[str, Mapping[str, str]]] = {
    "CaptioningSample": {"caption": "caption"},
    "VQASample": {"context": "question", "answers": "answers", "answer_weights": "weights"},
    "ChatMLWebdataset": {"conversation": "messages", "tools": "tools"},
}
#: Fields of ChatMLWebdataset that hold no single image.
_PICKLED: Final = ("jpgs", "mp4s", "videos")
_CRUDE: Final = "CrudeWebdataset"
_STEP: Final = re.compile(r"[^\[\]]+")
_MAX_NAMES: Final = 1_000_000
#: Braces in a name: the time to expand them grows with the square of their number.
_MAX_BRACES: Final = 1_000
_INNERMOST: Final = re.compile(r"\{([^{}]*)\}")
_RANGE: Final = re.compile(r"(-?\d+)\.\.(-?\d+)(\.\.-?\d+)?")

#: Places of a field: alternatives, each a part and the steps into it.
_Places = list[list[str]]


class EnergonOptions(SourceOptions):
    """Options of a prepared folder."""

    #: which of its splits is read (default: train)
    split: str | None = None


class EnergonSource(WebDatasetSource):
    """One split of a prepared folder."""

    Options = EnergonOptions
    SPLITS = False
    options: EnergonOptions

    def __init__(self, options: EnergonOptions, **places: Any) -> None:
        super().__init__(options, **places)
        self._image_places: _Places | None = None
        self._text_places: dict[str, _Places] = {}
        description = self._read_yaml("dataset.yaml")
        if description.get("__class__") != _CRUDE:
            self._set_places(description)
        splits = self._read_yaml("split.yaml")
        #: exclusions from all splits: tars, and samples as TAR/KEY
        self._excluded = frozenset(self._expand("exclude", splits.get("exclude") or []))
        self._split = options.split or "train"
        self._names = self._split_names(splits.get("split_parts"))

    def _set_places(self, description: Mapping[str, Any]) -> None:
        declared = description.get("sample_type") or description
        sample_type = str(declared.get("__class__"))
        field_map: Any = description.get("field_map")
        names = field_map.values() if isinstance(field_map, dict) else [None]
        if sample_type not in _SAMPLE_TYPES or not all(isinstance(one, str) for one in names):
            raise StageError(
                f"{self.root.path('.nv-meta/dataset.yaml')}: sample_type {sample_type!r} without "
                f"a field_map of names, or none of {', '.join(_SAMPLE_TYPES)}, {_CRUDE}; read "
                "packs with format packs, anything else with format webdataset and source.fields"
            )
        pickled = {"videos", "audio"} & field_map.keys() or {field_map.get("imgs")} & {*_PICKLED}
        if pickled:
            raise StageError(
                f"{self.root.path('.nv-meta/dataset.yaml')}: field_map names {pickled.pop()!r}, "
                "pickles or sound, which are not read; convert from what the shards were made of"
            )
        self.description = to_json([sample_type, field_map]).decode()
        image = field_map.get("imgs", field_map.get("image", "jpg"))
        self._image_places = _parse_places(image)
        for field, name in _SAMPLE_TYPES[sample_type].items():
            if field in field_map:
                self._text_places[name] = _parse_places(field_map[field])

    def scan(self, samples_per_part: int) -> Scan:
        scan = super().scan(samples_per_part)
        if self.options.split is None and self._others:
            logger.warning(
                "%s: split %r is read, and not %s; set source.split, one source for each",
                self.options.path,
                self._split,
                ", ".join(f"{name} ({len(tars)} tars)" for name, tars in self._others.items()),
            )
        samples = sorted(name for name in self._excluded if "/" in name)
        if not samples:
            return scan
        # The fingerprint covers the samples that are excluded from its tars.
        digest = xxhash.xxh3_128_hexdigest("\n".join([scan.fingerprint, *samples]).encode())
        return replace(scan, fingerprint=digest)

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        if not (path / ".nv-meta" / "dataset.yaml").is_file():
            return None
        tars = [name for name in file_names(path) if name.lower().endswith(".tar")]
        if tars and holds_packs(path, tars[0]):
            return None
        parts: Any = {}
        with suppress(OSError, UnicodeDecodeError, ConfigError):  # opening it tells
            text = (path / ".nv-meta" / "split.yaml").read_text("utf-8")
            parts = parse_yaml(text, "it").get("split_parts")
        filled = [name for name, own in parts.items() if own] if isinstance(parts, dict) else []
        return {"split": "train" if "train" in filled or not filled else filled[0]}

    def entries(self) -> Iterator[tuple[str, int, int]]:
        names = set(self._names)
        return (entry for entry in walk(self.root) if entry[0] in names)

    def files(self) -> list[tuple[str, int]]:
        sizes = {name: size for name, size, _ in self.entries()}
        try:
            return [(name, sizes[name]) for name in self._names]
        except KeyError as error:
            raise StageError(
                f"{self.root.path(error.args[0])}, which split {self._split!r} names, does not "
                "exist; restore it or prepare the dataset again"
            ) from error

    def _split_names(self, splits: Any) -> list[str]:
        """Return the tars of the split, in order."""
        splits, split = splits if isinstance(splits, dict) else {}, self._split
        if not splits.get(split):
            filled = ", ".join(str(name) for name, names in splits.items() if names)
            raise StageError(
                f"{self.root.path('.nv-meta/split.yaml')} has no tars in a split {split!r}; set "
                f"source.split to one of: {filled or 'none, as all are empty: energon prepare it'}"
            )
        self._others = {name: one for name, one in splits.items() if name != split and one}
        names = self._expand(f"split_parts.{split}", splits[split])
        return [name for name in names if name not in self._excluded]

    def _expand(self, field: str, patterns: Any) -> list[str]:
        """Return the names that a field of split.yaml lists, with braces expanded as Energon
        does."""
        try:
            if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
                raise ValueError(f"{patterns!r:.100} is no list of names")
            if any(pattern.count("{") > _MAX_BRACES for pattern in patterns):
                raise ValueError(f"a name has more than {_MAX_BRACES} braces")
            count = sum(map(_count_names, patterns))
            if count > _MAX_NAMES:
                raise ValueError(
                    f"its braces expand to {count:,} names, {_MAX_NAMES:,} is the limit"
                )
            return [name for pattern in patterns for name in braceexpand(pattern)]
        except (ValueError, RecursionError) as error:
            raise StageError(
                f"{self.root.path('.nv-meta/split.yaml')}: {field}: {error}; list tars, or "
                "TAR/KEY under exclude"
            ) from error

    def _records(self, key: str, sample: TarSample) -> Iterator[SourceRecord]:
        first = next(iter(sample.members.values())).name
        name = f"./{sample.key}" if first.startswith("./") else sample.key  # as Energon has it
        if f"{sample.container}/{name}" not in self._excluded:
            yield from super()._records(key, sample)

    def _read_yaml(self, name: str) -> Mapping[str, Any]:
        container = f".nv-meta/{name}"
        try:
            data = self.root.read(container)
            content: Any = parse_yaml(data.decode("utf-8"), "it")
            if not isinstance(content, dict):
                raise ConfigError("it holds no mapping")
        except (SampleError, UnicodeDecodeError, ConfigError) as error:
            remedy = "run energon prepare there"
            if Path(self.options.path).is_file():
                remedy = "source.path is a folder: give each that a metadataset lists as a source"
            raise StageError(
                f"{self.root.path(container)} cannot be read: {error}; {remedy}"
            ) from error
        return content

    def _media_parts(self, sample: TarSample) -> list[str]:
        if self._image_places is None:
            return super()._media_parts(sample)
        part = _first_part(self._image_places, sample)
        return [one for one in super()._media_parts(sample) if one == part]

    def _record_parts(self, sample: TarSample) -> list[str]:
        if not self._text_places:
            return super()._record_parts(sample)
        found = [_first_part(places, sample) for places in self._text_places.values()]
        parts = list(dict.fromkeys(part for part in found if part is not None))
        if not parts:
            raise SampleError("bad_record", f"no member for any of {', '.join(self._text_places)}")
        return parts

    def parse_parts(self, parts: Mapping[str, bytes]) -> Mapping[str, Any]:
        if not self._text_places:
            return super().parse_parts(parts)
        fields = {name: _value(places, parts) for name, places in self._text_places.items()}
        if "answers" in fields:
            fields["answers"] = best_answer(fields["answers"], fields.pop("weights", None))
        if isinstance(wrapped := fields.get("messages"), dict):  # with its tools beside it
            fields |= {"messages": wrapped.get("conversation"), **wrapped}
        return {name: value for name, value in fields.items() if value is not None}


def _count_names(pattern: str) -> int:
    """Count the names that a pattern expands to, or a few more; inner braces are counted first."""
    while inner := _INNERMOST.search(pattern):
        found = _RANGE.fullmatch(inner[1])
        count = abs(int(found[1]) - int(found[2])) + 1 if found else 0
        count = count or sum(map(_multiply, inner[1].split(",")))
        pattern = f"{pattern[: inner.start()]}\0{count}\0{pattern[inner.end() :]}"
    return _multiply(pattern)


def _multiply(text: str) -> int:
    return math.prod(map(int, text.split("\0")[1::2]))


def _parse_places(text: str) -> _Places:
    """Parse the places of a field: 'json[a][b],txt' -> [['json', 'a', 'b'], ['txt']]."""
    return [_STEP.findall(option) for option in text.split(",")]


def _first_part(places: _Places, sample: TarSample) -> str | None:
    found = (find_part(sample.members, place[0]) for place in places)
    return next((part for part in found if part is not None), None)


def _value(places: _Places, parts: Mapping[str, bytes]) -> Any:
    for name, *steps in places:
        part = find_part(parts, name)
        if part is not None:
            is_json = part.rpartition(".")[2].lower() == "json"
            data = parts[part]
            if is_json and not steps:
                return load_json(b'{"": %b}' % data)[""]
            return follow(load_json(data), tuple(steps)) if is_json else decode_text(data)
    return None
