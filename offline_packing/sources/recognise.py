"""Recognise the data at a path: format, task, and some records as they would be packed."""

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from offline_packing.errors import StageError
from offline_packing.sources import SOURCES, open_source
from offline_packing.sources.base import Source, SourceRecord
from offline_packing.sources.lost_fields import UNUSED_MEDIA, lost_fields
from offline_packing.sources.options import MediaOptions
from offline_packing.sources.reading.contents import find_image_root
from task_encoders.records.forms import form_of
from task_encoders.records.record import load_json
from task_encoders.samples import SampleError, SourceSample
from task_encoders.samples.limits import MAX_JSON_BYTES

#: Records that are counted at most: enough for a validation split.
MANY: Final = 1000
_LOOKED_AT: Final = 50
_SHOWN: Final = 3


@dataclass(frozen=True)
class Example:
    """A record: its sample, or the reason why there is none, and its missing media."""

    key: str
    sample: SourceSample | None
    problem: str = ""
    #: name -> why it is not there
    missing: Mapping[str, str] = field(default_factory=dict)
    #: fields of the record that are not used
    unread: tuple[str, ...] = ()
    #: unused parts that should be used, see lost_fields.py
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recognised:
    """A path as a source: the options to read it with, other formats that it might be, examples."""

    options: dict[str, Any]
    others: tuple[str, ...]
    examples: tuple[Example, ...]
    #: number of records, counted up to MANY
    num_records: int


def recognise(path: str, *, task: str | None = None) -> Recognised:
    """Look at a local folder or file. Without `task`, the task is guessed from the records. Raises
    StageError if it is of no known format, or cannot be read."""
    fitting = _fitting(Path(path))
    if entries := _entries_of_internvl(Path(path)):
        raise StageError(
            f"{path!r} is InternVL's list of datasets: {', '.join(entries)}; call init with each "
            "annotation, and set source.image_root to its root"
        )
    forms = _forms_of_folders(Path(path)) if len(fitting) > 1 else {}
    if len(set(forms.values())) > 1:
        shown = ", ".join(f"{name} is {form}" for name, form in forms.items())
        raise StageError(
            f"{path!r} holds data of several forms: {shown}; call init with each folder, and list "
            "their sources in one configuration"
        )
    if not fitting:
        raise StageError(
            f"{path!r} is of no known format; the formats are {', '.join(SOURCES)}: see "
            "docs/input.md, or write your own source as in examples/csv_source.py"
        )
    name, *others = fitting
    options = {"format": name, "path": path, "task": task or "bmr", **fitting[name]}
    records = list(itertools.islice(_all_records(open_source(options)), _LOOKED_AT))
    if task is None:
        options["task"] = _guess_task(records)
    source = open_source(options)
    examples = [_example(source, record) for record in records[:_SHOWN]]
    missing = [next(iter(example.missing)) for example in examples if example.missing]
    if missing and missing[0].startswith("/"):
        root = _common_root(source)
    else:
        root = next(filter(None, (find_image_root(path, name) for name in missing)), None)
    if root is not None and isinstance(source.options, MediaOptions):
        options["image_root"] = root
        source = open_source(options)
        examples = [_example(source, record) for record in records[:_SHOWN]]
    samples = [one.sample for one in examples if one.sample]
    lost = "".join(line for one in examples for line in one.lost)
    has_media = UNUSED_MEDIA in lost or any(sample.media for sample in samples)
    if samples and not has_media and options["task"] != "bmr" and name != "text":
        options["text_only"] = True
    num_records = len(records)
    if num_records == _LOOKED_AT:
        num_records = sum(1 for _ in itertools.islice(_all_records(source), MANY))
    return Recognised(options, tuple(others), tuple(examples), num_records)


def _fitting(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the formats that a path may be of, and the options that each would be read with."""
    found = ((name, source.recognise(path)) for name, source in SOURCES.items())
    return {name: options for name, options in found if options is not None}


def _forms_of_folders(path: Path) -> dict[str, str]:
    """Return the formats of the folders in a folder, by name, where they are of any."""
    folders = sorted(one for one in path.iterdir() if one.is_dir()) if path.is_dir() else []
    found = {folder.name: " or ".join(_fitting(folder)) for folder in folders}
    return {name: form for name, form in found.items() if form}


def _entries_of_internvl(path: Path) -> list[str]:
    """Return the entries of InternVL's meta.json, in words; none if the path is something else."""
    if path.suffix != ".json" or not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return []
    with suppress(SampleError):
        content = load_json(path.read_bytes())
        if isinstance(content, dict) and all(isinstance(one, dict) for one in content.values()):
            return [
                f"{name} (annotation {one['annotation']}, root {one.get('root')})"
                for name, one in content.items()
                if "annotation" in one
            ]
    return []


def _all_records(source: Source) -> Iterator[SourceRecord]:
    return (record for part in source.unread_parts() for record in source.records(part))


def _common_root(source: Source) -> str | None:
    """Find the folder that holds all files that records name by absolute paths; None: there is
    none."""
    root = None
    for record in tqdm(_all_records(source), "reading paths of images", unit="record", delay=2):
        try:
            sample = source.sample(record, record.key)
        except SampleError:
            continue
        folders = {os.path.dirname(name) for name in sample.media if name.startswith("/")}
        if folders:
            root = os.path.commonpath([*folders, *([root] if root else [])])
    return root if root and os.path.isdir(root) else None


def _guess_task(records: list[SourceRecord]) -> str:
    contents = [r.content for r in records if not isinstance(r.content, SampleError)]
    tasks = {form_of({k: v for k, v in content.items() if v}).task for content in contents}
    return next((task for task in ("bmr", "vqa") if task in tasks), "captioning")


def _example(source: Source, record: SourceRecord) -> Example:
    try:
        sample = source.sample(record, record.key)
    except SampleError as error:
        return Example(record.key, None, str(error))
    missing = {}
    for name in sample.media:
        try:
            source.open_media(record, name)[1].close()
        except SampleError as error:
            is_missing = error.reason == "missing_image"
            missing[name] = "NOT FOUND" if is_missing else f"REFUSED: {error.detail}"
    found = sorted(lost_fields(record, sample, source.fields))
    lost = [f"{what}, such as {shown}" if shown else what for what, shown in found]
    assert not isinstance(record.content, SampleError)  # it has a sample
    used = form_of(record.content).used(record.content, sample.task)
    unread = tuple(name for name in record.content if name not in {*used, "id"})
    return Example(record.key, sample, "", missing, record.unread[0] + unread, tuple(lost))
