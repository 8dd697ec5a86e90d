"""Read one sample from one JSON object, whose form is one of forms.py."""

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote

import orjson

from task_encoders.packs.pack_format import is_image_name, is_video_name
from task_encoders.records.forms import chosen_name, form_of, is_scalar, named_media, quoted
from task_encoders.records.marks import place_images, place_pictures, place_videos, shown_text
from task_encoders.records.messages import Draft, kind_of, parsed, read_tools
from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    SampleError,
    SourceSample,
    Turn,
    check_sample,
    count_placeholders,
    options_of_media,
    refuse_codec_input,
    split_at_media,
)
from task_encoders.samples.limits import parse_json
from task_encoders.samples.medium_options import MediumOptions

#: A longer "id" is not a key.
_MAX_KEY_LENGTH: Final = 4096
_UTF8_BOM: Final = b"\xef\xbb\xbf"
#: Field with lists that rate the turns, {place: (a list, the least that a turn needs)}: see
#: `source.min_rating`.
RATED: Final = "source.min_rating"

#: Field with options of media besides those in messages: of each medium, or {name: a value for the
#: only video, or a list of a value for each}; see `source.fields`.
ASKED: Final = "source.options"

#: Marks in texts that ms-swift replaces by what a record's "objects" hold.
_BOX_MARKS: Final = ("<bbox>", "<ref-object>")

#: Fields that a record may hold and that would be lost.
_UNPACKED: Final = ("audios", "audio")


def load_json(data: bytes) -> Mapping[str, Any]:
    """Parse a record. Raises SampleError: bad_json, too_costly, or bad_record if it is not an
    object."""
    try:
        content = parse_json(data.removeprefix(_UTF8_BOM))
    except orjson.JSONDecodeError as error:
        raise SampleError("bad_json", " ".join(str(error).split())[:200]) from error
    if not isinstance(content, dict):
        raise SampleError("bad_record", f"the JSON is {kind_of(content)}, not an object")
    return content


def decode_text(data: bytes) -> str:
    """Decode a text that is a whole record, without a byte order mark. Raises SampleError: bad_json
    if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SampleError("bad_json", f"the text is not UTF-8: {error}") from error


def own_key(content: Mapping[str, Any]) -> str:
    """Return the record's own key, its "id" if that is text or a whole number; else ""."""
    identity = content.get("id")
    key = str(identity) if type(identity) in (str, int) else ""
    return key if len(key) <= _MAX_KEY_LENGTH else ""


def to_sample(
    content: Mapping[str, Any],
    key: str,
    task: str,
    paired_media: Sequence[str] | None = None,
    is_file: Callable[[str], bool] | None = None,
) -> SourceSample:
    """Return the sample of a parsed record. `paired_media` are images and videos with the record's
    name, where the format pairs by name. `is_file` tells which names in texts are pictures; without
    it, texts hold none. Raises SampleError if the record cannot be used."""
    for lost in filter(content.get, _UNPACKED):
        raise SampleError("bad_record", f"the record has {lost!r}, which are not packed")
    if content.get("patch_positions"):
        refuse_codec_input(content["patch_positions"])
    form = form_of(content)
    names = form.names(content, task)
    draft = form.read(content, names, task)
    if draft.is_document and task != "captioning":
        raise SampleError("bad_record", "a document; set source.task=captioning to pack it")
    beside = content.get("system") if form.has_system(task) else None
    if not isinstance(beside, str | None):
        raise SampleError("bad_record", f"'system' is {kind_of(beside)}, not text")
    if draft.system and beside and draft.system != beside:
        raise SampleError("bad_record", "'system' is not the system message among the messages")
    system = (beside or None) if draft.system is None else draft.system
    images = _one_list(content, "images", draft.images)
    videos = _one_list(content, "videos", draft.videos)
    inline: list[str] = []
    turns, text = draft.turns, shown_text(draft.turns, task)
    if is_file is not None and ("<img>" in text or "![" in text):
        turns, inline = place_pictures(turns, task, is_file)
    if inline and images:
        shown = f"pictures in its texts, such as {inline[0][:60]!r}, and names others"
        raise SampleError("bad_record", f"the record has {shown}")
    images = inline or images
    if images is videos is None and paired_media is not None:
        if not paired_media:
            raise SampleError("missing_image", "no image next to it has the record's name")
        if len(paired_media) > 1:
            raise SampleError("ambiguous_image", f"the record names none of {quoted(paired_media)}")
        is_video = is_video_name(paired_media[0])
        images, videos = (None, paired_media) if is_video else (paired_media, None)
    images, videos = images or (), videos or ()
    if videos and not images:
        turns = place_videos(turns, task, len(videos))
    elif images and (text.count(IMAGE_PLACEHOLDER) != len(images) or "</image>" in text):
        turns = place_images(turns, task, len(images))
    tools = read_tools(content.get(chosen_name(content, "tools")))
    media = tuple(images), system, tuple(videos)
    options = _read_options(content.get(ASKED), draft, len(images), len(videos))
    sample = SourceSample(key, task, tuple(turns), *media, tools, options)
    if content.get(RATED):
        sample = _well_rated(sample, content[RATED])
    check_sample(sample)
    if task != "captioning":
        _check_places(sample)
    if content.get("objects"):
        _check_boxes(sample)
    return sample


def check_prompts_are_shown(sample: SourceSample) -> None:
    """Raise SampleError: lost_prompt for a prompt of a caption, which no model would be shown."""
    for turn in sample.turns if sample.task == "captioning" else ():
        text = turn.prompt.replace(IMAGE_PLACEHOLDER, "").replace(VIDEO_PLACEHOLDER, "").strip()
        if text:
            raise SampleError(
                "lost_prompt",
                f"captioning would not show the prompt {text[:60]!r}; set source.task to vqa or "
                "bmr, or source.ignore_prompts=true to train the answers as captions",
            )


def _well_rated(sample: SourceSample, ratings: Mapping[str, tuple[Any, float]]) -> SourceSample:
    """Remove the turns that have an entry below its minimum. An entry that is null, or an empty
    text in place of the list, keeps turns, as in nanoVLM (data/datasets.py). Placeholders of a
    removed turn move to the next turn, or to the end of the last one. Raises SampleError:
    bad_record; not_chosen if no turn is left."""
    turns, low = sample.turns, set[int]()
    for name, (given, least) in ratings.items():
        entries = parsed(given, name) if isinstance(given, str) else given
        if entries is None:
            continue
        are_entries = isinstance(entries, list) and len(entries) == len(turns)
        if not are_entries or not all(one is None or is_scalar(one) for one in entries):
            raise SampleError(
                "bad_record", f"{name!r} is not a list of {len(turns)} numbers or nulls"
            )
        low |= {i for i, entry in enumerate(entries) if entry is not None and entry < least}
    for i, turn in enumerate(turns):  # a tool's result goes with its call
        begins = turn.before[0][0] if turn.before else turn.role
        if begins == "tool" and i - 1 in low:
            low.add(i)
    if len(low) == len(turns):
        limits = ", ".join(f"{name} {least:g}" for name, (_, least) in ratings.items())
        raise SampleError("not_chosen", f"each turn is below source.min_rating ({limits})")
    chosen, held = list[Turn](), ""
    for i, turn in enumerate(turns):
        said = [*turn.before, (turn.role, turn.prompt)]
        found = ["".join(split_at_media(sample, text)[1::2]) for _, text in said]
        if i in low:
            held += "".join(found)
            continue
        first = next((place for place, own in enumerate(found) if own), -1)
        said[first] = said[first][0], held + said[first][1]  # they are in this order
        chosen.append(replace(turn, before=tuple(said[:-1]), prompt=said[-1][1]))
        held = ""
    chosen[-1] = replace(chosen[-1], prompt=chosen[-1].prompt + held)
    return replace(sample, turns=tuple(chosen))


def _one_list(
    content: Mapping[str, Any], field: str, in_messages: Sequence[str | None]
) -> Sequence[str] | None:
    """Return the names of media that a record or its messages hold; None where there are none."""
    named = named_media(content, field)
    if named is None and not in_messages:
        return None
    names = [name for name in in_messages if name is not None]
    given = (*names, *(named or ()))
    are_names = {str}.issuperset(map(type, given))
    are_frames = len(given) > 1 and are_names and all(map(is_image_name, given))
    if field == "videos" and (are_frames or list in map(type, given)):
        what = "frames of videos; tools/join_frames.py makes videos of them"
        raise SampleError("bad_record", f"{field!r} holds {what}")
    if not are_names:
        raise SampleError("bad_record", f"{field!r} holds something other than file names")
    if not names:
        return named
    if len(names) < len(in_messages) or (named and named != names):
        raise SampleError("bad_record", f"some {field} are named in the messages, others are not")
    return names


def _read_options(
    beside: Any, draft: Draft, num_images: int, num_videos: int
) -> tuple[MediumOptions, ...]:
    """Return `SourceSample.options` from the parts of messages that name media, and the field ASKED
    of the record. Raises SampleError: bad_record."""
    if not beside and not any(draft.parts):
        return ()
    if isinstance(beside, list):
        return options_of_media(beside, num_images, num_videos)
    images, videos = (
        ([*parts, *[{}] * number])[:number]
        for parts, number in zip(draft.parts, (num_images, num_videos), strict=True)
    )
    for name, given in beside.items() if beside and videos else ():
        values = given if isinstance(given, list) else [given]
        if len(values) != num_videos:
            what = f"{len(values)} values of {name!r} for {num_videos} videos"
            raise SampleError("bad_record", what)
        videos = [{**part, name: value} for part, value in zip(videos, values, strict=True)]
    return options_of_media([*images, *videos], num_images, num_videos)


def _check_places(sample: SourceSample) -> None:
    """Refuse placeholders that are only in the answers: they would be trained as text."""
    for kind, mark, names in sample.by_kind:
        if not names or count_placeholders(sample.turns, mark, sample.task):
            continue
        if sum(turn.answer.count(mark) for turn in sample.turns) == len(names):
            raise SampleError(
                f"{kind}_count_mismatch", f"{mark} is in answers, where no {kind} can be shown"
            )


def _check_boxes(sample: SourceSample) -> None:
    """Refuse ms-swift's marks of boxes and names in "objects": they would be trained as text."""
    texts = [text for turn in sample.turns for text in (turn.prompt, turn.answer)]
    mark = next((mark for mark in _BOX_MARKS for text in texts if mark in text), None)
    if mark is not None:
        raise SampleError(
            "bad_record", f"{mark} is a place for a value of 'objects'; write the value"
        )


#: No file of an image or a video is as short; the name of one may be.
_MIN_LENGTH: Final = 64
#: First bytes of image and video files.
_BEGINNINGS: Final = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF|BM|II\*\0|MM\0\*|\x1aE\xdf\xa3|....ftyp", re.DOTALL
)
_HEADING: Final = re.compile(r"data:[^,]{0,200}?;base64,", re.IGNORECASE)


def is_inline(name: str) -> bool:
    """Tell whether the name of a medium is the medium itself: a `data:` URI, or base64 without a
    dot of a known kind of file."""
    if name[:5].lower() == "data:":
        return True
    if len(name) < _MIN_LENGTH or "." in name:
        return False
    try:
        return _BEGINNINGS.match(base64.b64decode(name[:16], validate=True)) is not None
    except ValueError:
        return False


def decode_inline(name: str) -> bytes:
    """Return the bytes of a medium that its name holds. Raises SampleError: bad_image, or of a
    video bad_video."""
    payload = name
    if name[:5].lower() == "data:":
        heading = _HEADING.match(name)
        if heading is None:
            raise _bad(name, "is not data:TYPE;base64,...")
        payload = name[heading.end() :]
        payload = unquote(payload) if "%" in payload else payload
    payload = "".join(payload.split()).rstrip("=")  # MIME breaks lines; some leave the end out
    try:
        return base64.b64decode(payload + "=" * (-len(payload) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(name, f"is no base64: {error}") from error


def _bad(name: str, problem: str) -> SampleError:
    reason = "bad_video" if name[:10].lower() == "data:video" else "bad_image"
    return SampleError(reason, f"{name[:40]!r}... {problem}")
