"""Datasets that are prepared for Megatron-Energon: captioning, VQA and crude ones.

    .nv-meta/dataset.yaml   sample_type: {__module__: megatron.energon, __class__: CaptioningSample}
                            field_map: {image: jpg, caption: "json[caption]"}
    .nv-meta/split.yaml     which tars belong to which split

Of a VQA sample's answers the one with the largest weight is taken, the first where there are none.
A crude dataset, whose meaning is in the trainer's own code, is read as plain WebDataset. A
`sample_loader` is code as well, and is not run.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

from offline_packing.errors import StageError
from offline_packing.sources.base import MAX_JSON_BYTES
from offline_packing.sources.fields import follow
from offline_packing.sources.listing import walk
from offline_packing.sources.records import load_json
from offline_packing.sources.webdataset import TarSample, WebDatasetSource, decode_text
from offline_packing.yaml_text import parse_yaml
from task_encoders.samples import SampleError

#: Fields of Energon's sample types, and what they are in a record.
_SAMPLE_TYPES: Final[Mapping[str, Mapping[str, str]]] = {
    "CaptioningSample": {"caption": "caption"},
    "VQASample": {"context": "question", "answers": "answers", "answer_weights": "weights"},
}
_CRUDE: Final = "CrudeWebdataset"
_RANGE: Final = re.compile(r"\{(\d+)\.\.(\d+)\}")
_STEP: Final = re.compile(r"[^\[\]]+")

#: Where a field lies: alternatives, each a part and the steps into it.
_Places = list[list[str]]


class EnergonSource(WebDatasetSource):
    """One split of a prepared folder."""

    OPTIONS = frozenset({"split"})

    def __init__(self, path: str, task: str, **options: Any) -> None:
        super().__init__(path, task, **options)
        description = self._read_yaml("dataset.yaml")
        self._image_places: _Places | None = None
        self._text_places: dict[str, _Places] = {}
        if description.get("__class__") == _CRUDE:
            return
        sample_type = str((description.get("sample_type") or {}).get("__class__"))
        field_map = description.get("field_map")
        if sample_type not in _SAMPLE_TYPES or not isinstance(field_map, dict):
            raise StageError(
                f"{self.root.path('.nv-meta/dataset.yaml')}: sample_type {sample_type!r} without "
                f"a field_map, or none of {', '.join(_SAMPLE_TYPES)}, {_CRUDE}; read packs with "
                "format packs, anything else with format webdataset and source.fields"
            )
        self._image_places = _parse_places(str(field_map.get("image", "jpg")))
        for field, name in _SAMPLE_TYPES[sample_type].items():
            if field in field_map:
                self._text_places[name] = _parse_places(str(field_map[field]))

    def entries(self) -> Iterator[tuple[str, int, int]]:
        names = set(self._split_names())
        return (entry for entry in walk(self.root) if entry[0] in names)

    def _tars(self) -> list[tuple[str, int]]:
        sizes = {name: size for name, size, _ in self.entries()}
        names = self._split_names()
        missing = [name for name in names if name not in sizes]
        if missing:
            raise StageError(
                f"{self.root.path(missing[0])}, which split {self.split or 'train'!r} names, is "
                "not there; restore it or prepare the dataset again"
            )
        return [(name, sizes[name]) for name in names]

    def _split_names(self) -> list[str]:
        """The tars of the split, in order."""
        description = self._read_yaml("split.yaml")
        splits = description.get("split_parts") or {}
        split = self.split or "train"
        if not splits.get(split):
            raise StageError(
                f"{self.root.path('.nv-meta/split.yaml')} has no split {split!r}; set source.split "
                f"to one of: {', '.join(splits) or 'none'}"
            )
        excluded = set(description.get("exclude") or ())
        wanted = [name for pattern in splits[split] for name in expand_range(str(pattern))]
        return [name for name in wanted if name not in excluded]

    def _read_yaml(self, name: str) -> Mapping[str, Any]:
        container = f".nv-meta/{name}"
        try:
            data = self.root.read(container, MAX_JSON_BYTES)
            content = parse_yaml(data.decode("utf-8"), self.root.path(container))
        except (SampleError, UnicodeDecodeError) as error:
            raise StageError(
                f"{self.root.path(container)} cannot be read: {error}; run energon prepare there"
            ) from error
        if not isinstance(content, dict):
            raise StageError(f"{self.root.path(container)} holds no mapping")
        return content

    def _media(self, sample: TarSample) -> list[str]:
        if self._image_places is None:
            return super()._media(sample)
        part = _first_part(self._image_places, sample)
        chosen = {} if part is None else {part: sample.members[part]}
        return super()._media(TarSample(sample.key, chosen, sample.data, sample.damage))

    def _record_parts(self, sample: TarSample, file: BinaryIO) -> list[str]:
        if not self._text_places:
            return super()._record_parts(sample, file)
        found = [_first_part(places, sample) for places in self._text_places.values()]
        parts = list(dict.fromkeys(part for part in found if part is not None))
        if not parts:
            raise SampleError("bad_record", f"none of the members that {sorted(self._text_places)}")
        return parts

    def parse_parts(self, parts: Mapping[str, bytes]) -> Mapping[str, Any]:
        if not self._text_places:
            return super().parse_parts(parts)
        fields = {name: _value(places, parts) for name, places in self._text_places.items()}
        if "answers" in fields:
            fields["answers"] = _best_answer(fields["answers"], fields.pop("weights", None))
        return {name: value for name, value in fields.items() if value is not None}


def expand_range(pattern: str) -> list[str]:
    """'a-{00..02}.tar' -> ['a-00.tar', 'a-01.tar', 'a-02.tar']."""
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    first, last = found.groups()
    return [
        name
        for number in range(int(first), int(last) + 1)
        for name in expand_range(_RANGE.sub(f"{number:0{len(first)}d}", pattern, count=1))
    ]


def _parse_places(text: str) -> _Places:
    """'json[a][b],txt' -> [['json', 'a', 'b'], ['txt']]."""
    return [_STEP.findall(option) for option in text.split(",")]


def _first_part(places: _Places, sample: TarSample) -> str | None:
    return next((place[0] for place in places if place[0] in sample.members), None)


def _value(places: _Places, parts: Mapping[str, bytes]) -> Any:
    place = next((place for place in places if place[0] in parts), None)
    if place is None:
        return None
    part, *steps = place
    if part.rpartition(".")[2] != "json":
        return decode_text(parts[part])
    return follow({part: load_json(parts[part])}, (part, *steps))


def _best_answer(answers: Any, weights: Any) -> Any:
    if not isinstance(answers, list) or not answers:
        return answers
    if (
        isinstance(weights, list)
        and len(weights) == len(answers)
        and all(isinstance(weight, int | float) for weight in weights)
    ):
        return answers[max(range(len(answers)), key=lambda i: weights[i])]
    return answers[0]
