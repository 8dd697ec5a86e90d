"""Several questions on one image -> `{img, json}` pairs: numbered copies, or one dialogue.

    python tools/convert_questions.py jsonl questions.jsonl pairs/ --form dialogue --max-tokens 2048
    python tools/convert_questions.py parquet data/ pairs/ --form copies --fields question=q

FORMAT is any source format of `offline-packing`. A pair has one image and one conversation:

    a.jpg: "What is it?", "Which colour?"   copies    a.jpg a.json  a_1.jpg a_1.json
                                            dialogue  a.jpg a.json with two turns

In a dialogue the image costs its tokens once, and later questions see the earlier answers. Images
are the same if all their bytes are, in files of any name or rows of a table. Records stay apart if
their system messages or tools differ, if they have thoughts (templates show only thoughts of the
last answers), or if they ask nothing. A record whose question and answer are lists asks several
questions too. A record with messages is a conversation, whose later turns may refer to earlier
ones: copies keep it whole. Samples without an image are written unchanged, samples with several are
left out and listed. --max-turns and --max-tokens, counted as in training, keep dialogues from
outgrowing a sequence.
"""

import argparse
import io
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from offline_packing.errors import StageError
from offline_packing.measure.identity import digest_sample
from offline_packing.runs.run import open_encoder
from offline_packing.sources import Locator, Source, SourceRecord, open_source
from offline_packing.storage.files import write_atomically
from offline_packing.storage.yaml_file import parse_yaml
from task_encoders.families import model_options
from task_encoders.families.base.family import FamilyEncoder
from task_encoders.media.image import read_image_header
from task_encoders.packs.pack_format import image_extension
from task_encoders.records.forms import DIALOGUES
from task_encoders.records.record import to_sample
from task_encoders.samples import IMAGE_PLACEHOLDER, SampleError, SourceSample
from task_encoders.text.pieces import to_messages

FORMS: Final = ("copies", "dialogue")


class Found(NamedTuple):
    """A sample, and of its image, if it has one, place, extension and (height, width)."""

    sample: SourceSample
    place: Locator | None = None
    extension: str = ""
    size: tuple[int, int] = (0, 0)
    #: that samples share which may be one dialogue: of the image's bytes, system message and tools
    identity: bytes = b""


def read_samples(
    source: Source, skipped: list[str], *, split_lists: bool = False
) -> Iterator[Found]:
    """The samples of a source that have one image or none; "key: why" of the others goes to
    `skipped`.

    Args:
        split_lists: a record with a list of questions is one sample per question.
    """
    for part in source.scan(4096).parts:
        for record in source.records(part):
            try:
                if isinstance(record.content, SampleError):
                    raise record.content
                paired, is_file = record.paired_media, source.files_at(record.locator)
                sample = to_sample(record.content, record.key, source.task, paired, is_file)
                if len(sample.images) > 1 or sample.videos or sample.options:
                    what = f"{len(sample.images)} images, {len(sample.videos)} videos"
                    what = "options of images" if sample.options else what
                    raise SampleError("bad_record", f"{what}: not a pair")
                found = _find_image(source, record, sample)
                has_dialogue = any(record.content.get(name) for name in DIALOGUES)
                is_list = split_lists and not has_dialogue
                for turns in ((turn,) for turn in sample.turns) if is_list else (sample.turns,):
                    yield found._replace(sample=replace(sample, turns=turns))
            except SampleError as error:
                skipped.append(f"{record.key}: {error}")


def _find_image(source: Source, record: SourceRecord, sample: SourceSample) -> Found:
    if not sample.images:
        return Found(sample)
    place, file = source.open_media(record, sample.images[0])
    with file:
        data = file.read()
    header = read_image_header(io.BytesIO(data))
    extension = image_extension(sample.images[0], header.format)
    identity = digest_sample(replace(sample, turns=()), [data])
    return Found(sample, place, extension, (header.height, header.width), identity)


def merge_turns(samples: Sequence[SourceSample]) -> SourceSample:
    """One dialogue from samples with the same single image, shown with its first question."""
    first, *others = samples
    turns = list(first.turns)
    for sample in others:
        for turn in sample.turns:
            prompt = turn.prompt.replace(f"{IMAGE_PLACEHOLDER}\n", "")
            turns.append(replace(turn, prompt=prompt.replace(IMAGE_PLACEHOLDER, "")))
    return replace(first, turns=tuple(turns))


def group_by_image(
    found: Iterable[Found],
    max_turns: int,
    max_tokens: int = 0,
    encoder: FamilyEncoder | None = None,
) -> Iterator[Found]:
    """Samples of the same image as one dialogue, in the order in which images first appear. One
    that would have more turns, or more tokens for an encoder, continues in another sample."""
    groups: dict[bytes | int, list[Found]] = {}
    for i, one in enumerate(found):
        groups.setdefault(one.identity if _may_join(one.sample) else i, []).append(one)
    for first, *others in groups.values():
        held = first
        for one in others:
            joined = held._replace(sample=merge_turns([held.sample, one.sample]))
            if len(joined.sample.turns) <= max_turns and (
                encoder is None or _num_tokens(joined, encoder) <= max_tokens
            ):
                held = joined
            else:
                yield held
                held = one
        yield held


def _may_join(sample: SourceSample) -> bool:
    thinks = any(turn.thought is not None or "</think>" in turn.answer for turn in sample.turns)
    asks = all(turn.prompt.replace(IMAGE_PLACEHOLDER, "").strip() for turn in sample.turns)
    return bool(sample.images) and asks and not thinks


def _num_tokens(found: Found, encoder: FamilyEncoder) -> float:
    """Tokens of a sample; infinitely many where no template takes it."""
    try:
        return encoder.measure(found.sample, [found.size]).num_tokens
    except SampleError:
        return math.inf


def write_pairs(source: Source, found: Iterable[Found], folder: Path) -> int:
    """Write `{img, json}` pairs; the n-th sample of a name is NAME_n. Returns their number.

    Images are copied; further copies of a file are links to the first, where the file system can,
    never to the source's own file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken: dict[str, int] = {}
    copies: dict[str, Path] = {}  # of the images that are files, by their container
    count = 0
    for sample, place, extension, *_ in found:
        # Named after the image's file, or after the sample whose image is inside a container.
        origin = place.container if place is not None and place.kind == "file" else sample.key
        name = _free_name(Path(origin).stem.replace(":", "_"), taken)
        images = []
        if place is not None:
            images = [f"{name}.{extension}"]
            _put_image(source, place, folder / images[0], copies)
        record: dict[str, Any] = {"messages": to_messages(sample), "images": images}
        if sample.tools:
            record["tools"] = sample.tools
        write_atomically(folder / f"{name}.json", orjson.dumps(record))
        count += 1
    return count


def _free_name(base: str, taken: dict[str, int]) -> str:
    """'a', then 'a_1', 'a_2', ...; never one that another base has taken."""
    name = base
    while name in taken:
        name = f"{base}_{taken[base]}"
        taken[base] += 1
    taken.setdefault(name, 1)
    return name


def _put_image(source: Source, place: Locator, path: Path, copies: dict[str, Path]) -> None:
    first = copies.setdefault(place.container, path) if place.kind == "file" else path
    if first is path:
        path.write_bytes(source.read_media(place))
        return
    try:
        os.link(first, path)
    except OSError:  # no links on this file system, or too many of one file
        shutil.copyfile(first, path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("format", help="pairs, json, jsonl, parquet, webdataset, ...")
    parser.add_argument("path", help="the source")
    parser.add_argument("output", type=Path, help="folder for the pairs; must not exist")
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--max-turns", type=int, default=16, help="of a dialogue (default: 16)")
    parser.add_argument("--max-tokens", type=int, help="of a dialogue, see --model")
    parser.add_argument(
        "--model",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="section model of the configuration, for --max-tokens: family=qwen2_vl processor=PATH",
    )
    parser.add_argument("--image-root", help="image paths are relative to this folder")
    parser.add_argument("--fields", nargs="*", default=[], metavar="NAME=PLACE")
    parser.add_argument(
        "--options",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="others of its format: split=val",
    )
    given = parser.parse_args(arguments)
    fields = dict(field.split("=", 1) for field in given.fields)
    model = dict(option.split("=", 1) for option in given.model)
    if given.output.exists():
        parser.error(f"{given.output} exists; choose another folder")
    skipped: list[str] = []
    try:
        options = dict(option.split("=", 1) for option in given.options)
        options |= {"format": given.format, "path": given.path, "task": "bmr", "fields": fields}
        if given.image_root is not None:
            options["image_root"] = given.image_root
        source = open_source(options, unpack_folder=given.output / ".unpacked")
        found = read_samples(source, skipped, split_lists=given.form == "copies")
        if given.form == "dialogue":
            encoder = None
            if given.max_tokens is not None:
                values = {name: parse_yaml(text, f"--model {name}") for name, text in model.items()}
                encoder = open_encoder(model_options(**values))
            found = group_by_image(found, given.max_turns, given.max_tokens or 0, encoder)
        count = write_pairs(source, found, given.output)
    except (StageError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"wrote {count:,} pairs to {given.output}; left out {len(skipped):,}")
    for line in skipped[:20]:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
