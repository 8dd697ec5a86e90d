"""Read one sample from one JSON object in one of these forms:

    {"messages" | "conversations" | "texts": [...], "images": [str, ...]}     see messages.py
    {"captions": [{"content": str}]}, {"captions": [str]}, {"caption": str}
    {"question" | "prompt" | "context": str, "answer" | "answers": str}
    {"instruction": str, "input": str, "output": str}                 Alpaca; "input" may lack
    {"query": str, "response": str, "history": [[str, str], ...]}     ms-swift; so may "history"
    {"text": str}     a caption, or plain text without an image; a document, with `<image>` in it
    {"texts" | "text_list": [...], ...}                               documents, see documents.py

The first prompt and the first answer of a record, in the order of PROMPT_FIELDS and
`answer_fields`, make its turn. Prompts and answers may also be two lists of equal length, one entry
per turn. Images are named by "images" or "image", videos by "videos" or "video"; the name may stand
in an object {"path": ...}. `system` is the system message, `tools` (or `functions`) what the model
may call. Other fields are ignored; offline_packing/sources/lost_fields.py reports it.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote

import orjson

from task_encoders.packs.pack_format import is_video_name
from task_encoders.records.documents import PICTURES, SENTENCES, is_in_turn, read_document
from task_encoders.records.messages import (
    Dialogue,
    kind_of,
    media_name,
    parsed,
    read_dialogue,
    read_tools,
)
from task_encoders.records.questions import (
    ANSWER_FIELDS,
    DIALOGUE_FIELDS,
    HISTORY,
    INPUT,
    PROMPT_FIELDS,
    answer_fields,
    first_field,
    is_scalar,
    quoted,
    read_turns,
)
from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    SampleError,
    SourceSample,
    Turn,
    check_sample,
    count_placeholders,
    refuse_codec_input,
    split_at_media,
)
from task_encoders.samples.limits import check_json

#: A longer "id" is not a key.
_MAX_KEY_LENGTH: Final = 4096
_UTF8_BOM: Final = b"\xef\xbb\xbf"
MEDIA_FIELDS: Final = frozenset(("image", "images", "video", "videos"))
_TOOLS: Final = ("tools", "functions")

#: Every field that `to_sample` reads, and "id".
RECORD_FIELDS: Final = (
    *("id", "system", *_TOOLS, *sorted(MEDIA_FIELDS)),
    *(SENTENCES, PICTURES, *DIALOGUE_FIELDS, *PROMPT_FIELDS, INPUT, HISTORY, *ANSWER_FIELDS),
)

#: Field with lists that rate the turns, {place: (a list, the least that a turn needs)}: see
#: `source.min_rating`.
RATED: Final = "source.min_rating"

#: Marks in texts that ms-swift replaces by what a record's "objects" hold.
_BOX_MARKS: Final = ("<bbox>", "<ref-object>")

#: Fields that a record may hold and that would be lost.
_UNPACKED: Final = ("audios", "audio")


def load_json(data: bytes) -> Mapping[str, Any]:
    """Parse a record. Raises SampleError: bad_json, too_costly, or bad_record if it is not an
    object."""
    check_json(data)
    try:
        content = orjson.loads(data.removeprefix(_UTF8_BOM))
    except orjson.JSONDecodeError as error:
        raise SampleError("bad_json", " ".join(str(error).split())[:200]) from error
    if not isinstance(content, dict):
        raise SampleError("bad_record", f"the JSON is {kind_of(content)}, not an object")
    return content


def decode_text(data: bytes) -> str:
    """Text that is a record. Raises SampleError: bad_json, where it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SampleError("bad_json", f"the text is not UTF-8: {error}") from error


def own_key(content: Mapping[str, Any]) -> str:
    """The key that a record has itself: "id", text or a whole number; else empty."""
    identity = content.get("id")
    is_key = isinstance(identity, str | int) and not isinstance(identity, bool)
    key = str(identity) if is_key else ""
    return key if len(key) <= _MAX_KEY_LENGTH else ""


def to_sample(
    content: Mapping[str, Any],
    key: str,
    task: str,
    paired_media: Sequence[str] | None = None,
) -> SourceSample:
    """The sample of a parsed record. `paired_media` are images and videos with the record's name,
    where the format pairs by name. Raises SampleError if the record cannot be used."""
    for lost in filter(content.get, _UNPACKED):
        raise SampleError("bad_record", f"the record has {lost!r}, which are not packed")
    refuse_codec_input(content.get("patch_positions"))
    name = first_field(content, DIALOGUE_FIELDS)
    found = read_document(content)
    if found is not None and task != "captioning":
        raise SampleError("bad_record", "a document; set source.task=captioning to pack it")
    if found is None and name:
        found = read_dialogue(content[name], name, task)
    elif found is None:
        found = Dialogue(turns=read_turns(content, task))
    system = _system(content, found.system) if name or task != "captioning" else None
    images, videos = _media(content, found, paired_media)
    turns = _mark_videos(found.turns, len(videos), task) if videos and not images else found.turns
    tools = "".join([read_tools(content[name]) for name in _TOOLS if content.get(name)])
    media = tuple(images), system, tuple(videos)
    sample = SourceSample(key, task, tuple(turns), *media, tools)
    if content.get(RATED):
        sample = _well_rated(sample, content[RATED])
    check_sample(sample)
    _check_places(sample)
    if content.get("objects"):
        _check_boxes(sample)
    return sample


def texts_read(content: Mapping[str, Any], task: str) -> set[str | None]:
    """Choose the fields with text that make the sample of a record."""
    beside = {*_TOOLS, None if task == "captioning" else "system"}
    if content.get(SENTENCES) is not None:
        return {*beside, SENTENCES, PICTURES}
    if name := first_field(content, DIALOGUE_FIELDS):
        return {*beside, "system", name}
    prompt = first_field(content, PROMPT_FIELDS)
    about = {"instruction": (INPUT, HISTORY), "query": (HISTORY,)}.get(prompt or "", ())
    return {*beside, *about, prompt, first_field(content, answer_fields(task))}


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


def named_media(content: Mapping[str, Any], kind: str) -> list[Any] | None:
    """Unchecked names of a record's media of a kind, "image" or "video"; None if it names none, []
    if it says that there are no images."""
    many = content.get(f"{kind}s")
    named = many or content.get(kind)
    named = many if named is None else named
    if named is None or (kind == "video" and not named):
        return None
    named = named if isinstance(named, list) else [named]
    names = [media_name(name) for name in named]
    return [name for name in names if name] if is_in_turn(content) else names


def best_answer(answers: Any, weights: Any) -> Any:
    """The answer of a VQA sample with the largest weight; without weights the first."""
    if not isinstance(answers, list) or not answers:
        return answers
    is_weighed = isinstance(weights, list) and all(isinstance(one, int | float) for one in weights)
    if not is_weighed or len(weights) != len(answers):
        return answers[0]
    return answers[weights.index(max(weights))]


def _mark_videos(turns: list[Turn], num_videos: int, task: str) -> list[Turn]:
    """Replace `<image>`, by which LLaVA-Video's records mark the places of videos, by our mark."""
    marks = [
        count_placeholders(turns, mark, task) for mark in (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER)
    ]
    if marks != [num_videos, 0]:
        return turns
    field = "answer" if task == "captioning" else "prompt"
    texts = [getattr(turn, field).replace(IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER) for turn in turns]
    return [replace(turn, **{field: text}) for turn, text in zip(turns, texts, strict=True)]


def _well_rated(sample: SourceSample, ratings: Mapping[str, tuple[Any, float]]) -> SourceSample:
    """The sample without turns that have an entry below its minimum; an entry that is null, or an
    empty text for the list, keeps them, as in nanoVLM (data/datasets.py). Their placeholders go to
    the next turn, or to the end of the last one. Raises SampleError: bad_record; not_chosen, where
    no turn is left."""
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


def _system(content: Mapping[str, Any], said: str | None) -> str | None:
    """The system message, which may stand among the messages, as `said`, or beside them."""
    beside = content.get("system")
    if beside is not None and not isinstance(beside, str):
        raise SampleError("bad_record", f"'system' is {kind_of(beside)}, not text")
    if said and beside and said != beside:
        raise SampleError("bad_record", "'system' is not the system message among the messages")
    return (beside or None) if said is None else said


def _media(
    content: Mapping[str, Any], found: Dialogue, paired_media: Sequence[str] | None
) -> tuple[Sequence[str], Sequence[str]]:
    """Names of the images and of the videos."""
    if found.images or found.videos or not MEDIA_FIELDS.isdisjoint(content):
        images = _one_list("images", named_media(content, "image"), found.images)
        videos = _one_list("videos", named_media(content, "video"), found.videos)
        if images is not None or videos is not None:
            return images or (), videos or ()
    if paired_media is None:
        return (), ()
    if not paired_media:
        raise SampleError("missing_image", "no image of the record's name beside it")
    if len(paired_media) > 1:
        raise SampleError("ambiguous_image", f"the record names none of {quoted(paired_media)}")
    return ((), paired_media) if is_video_name(paired_media[0]) else (paired_media, ())


def _one_list(
    field: str, named: list[Any] | None, in_messages: Sequence[str | None]
) -> Sequence[str] | None:
    """The names that a record or its messages hold; None where there are none."""
    names = [name for name in in_messages if name is not None]
    if not all(isinstance(name, str) for name in (*names, *(named or ()))):
        raise SampleError("bad_record", f"{field!r} holds something other than file names")
    if not names:
        return named
    if len(names) < len(in_messages) or (named and named != names):
        raise SampleError("bad_record", f"some {field} are named in the messages, others are not")
    return names


def _check_places(sample: SourceSample) -> None:
    """Refuse placeholders that are only in the answers: they would be trained as text."""
    for kind, mark, names in (
        ("image", IMAGE_PLACEHOLDER, sample.images),
        ("video", VIDEO_PLACEHOLDER, sample.videos),
    ):
        if not names or sample.task == "captioning":
            continue
        if count_placeholders(sample.turns, mark, sample.task):
            continue
        if sum(turn.answer.count(mark) for turn in sample.turns) == len(names):
            raise SampleError(
                f"{kind}_count_mismatch", f"{mark} stands in answers, where no {kind} can be shown"
            )


def _check_boxes(sample: SourceSample) -> None:
    """Refuse ms-swift's marks of boxes and names in "objects": they would be trained as text."""
    texts = [text for turn in sample.turns for text in (turn.prompt, turn.answer)]
    mark = next((mark for mark in _BOX_MARKS for text in texts if mark in text), None)
    if mark is not None:
        raise SampleError("bad_record", f"{mark} stands for a value of 'objects': write that there")


#: No file of an image or a video is as short; the name of one may be.
_MIN_LENGTH: Final = 64
#: First bytes of image and video files.
_BEGINNINGS: Final = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF|BM|II\*\0|MM\0\*|\x1aE\xdf\xa3|....ftyp", re.DOTALL
)
_HEADING: Final = re.compile(r"data:[^,]{0,200}?;base64,", re.IGNORECASE)


def is_inline(name: str) -> bool:
    """Whether the name of a medium is the medium itself: a `data:` URI, or base64 without a dot
    of a known kind of file."""
    if name[:5].lower() == "data:":
        return True
    if len(name) < _MIN_LENGTH or "." in name:
        return False
    try:
        return _BEGINNINGS.match(base64.b64decode(name[:16], validate=True)) is not None
    except ValueError:
        return False


def decode_inline(name: str) -> bytes:
    """The bytes of such a medium. Raises SampleError: bad_image, or of a video bad_video."""
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
