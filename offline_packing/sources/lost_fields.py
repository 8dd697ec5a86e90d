"""Content of records that is not trained on as its author meant: told with an example each, and
about how many samples it concerns, in the summary and the report (measure/diagnosis.py)."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from offline_packing.sources.base import SourceRecord
from offline_packing.sources.options import FieldMap
from task_encoders.packs.pack_format import MEDIA_EXTENSIONS
from task_encoders.records.forms import (
    MEDIA_FIELDS,
    PROMPTS,
    RECORD_FIELDS,
    REPLIES,
    Content,
    Names,
    form_of,
    is_scalar,
)
from task_encoders.records.marks import MARKS, PICTURE, shown_text
from task_encoders.records.messages import LOSS_FIELDS
from task_encoders.records.record import ASKED
from task_encoders.samples import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, SampleError, SourceSample

#: Part of every line on unused media: with one, a source without any picture is a mistake.
UNUSED_MEDIA: Final = "holds media that no sample uses"
#: Prefix of a control token that texts spell: such are told together, see `IndexInfo.warnings`.
SPELLED: Final = "control token "
_UNUSED_TEXT: Final = "holds text that no sample uses"
#: Names that fields with media have: image_2, img_path, video_url, frames.
_MEDIA_NAME: Final = re.compile(
    r"(image|img|picture|photo|video|clip|frame|media|jpe?g|png|webp|mp4)s?"
    r"(_?(path|file|name|url|list|bytes))*s?(_?\d+)?",
    re.IGNORECASE,
)
#: Fields with a record's identity or origin: a single word there does not count as text.
_LABEL_NAME: Final = re.compile(
    r"(.*_)?(id|uuid|key|md5|url|source|dataset|subset|split|license|language|category|type)s?",
    re.IGNORECASE,
)
#: Fields next to a prompt that the model should have seen as well.
_BESIDE_PROMPT: Final = ("choices", "options", "hint", "passage", *PROMPTS)
#: Marks of an image in other projects.
_OTHER_MARKS: Final = re.compile(
    rf"{MARKS.pattern}|<\|?(?:image_pad|vision_start|image|img|media|video_pad)\|?>", re.IGNORECASE
)
_EXAMPLE_LENGTH: Final = 60
#: Answers that data sets have where there was none.
_NOTHING: Final = re.compile(r"\s*(?:null|nan)\s*|[\s\u200b-\u200f\u2060\ufeff]*", re.IGNORECASE)
#: Modes of Pillow with more than 8 bits for a value, by their first letter: what becomes of such
#: images in RGB, in transformers' processors as here.
_CLIPPED: Final = {
    "I": "images of 16-bit grey become white wherever a value is above 255, as in transformers",
    "F": "images of floats are clipped to 0 … 255, as in transformers: values up to 1 become black",
}

#: A description, which is counted over all samples, and an example.
Lost = tuple[str, str]


def lost_fields(record: SourceRecord, sample: SourceSample, fields: FieldMap) -> Iterator[Lost]:
    """Yield the content of a record that its sample lacks."""
    content = record.content
    assert not isinstance(content, SampleError)
    form, task = form_of(content), sample.task
    names = form.names(content, task)
    used = {_base_name(name) for name in sample.media}
    told: dict[str, str] = {}
    if content.get("label") is False:
        told["label"] = "records say label: false, as preferences mark bad answers"
    prompt, answer = names.get("prompt"), names.get("answer")
    if task == "captioning" and answer in REPLIES and not (prompt and content[prompt]):
        told[answer] = f"field {answer!r} is trained as a caption; where is its question?"
    for name in _BESIDE_PROMPT if prompt and task != "captioning" else ():
        if name != prompt and content.get(name):
            told[name] = f"field {name!r} is not shown beside {prompt!r}"
    yield from ((line, _shown(content[name])) for name, line in told.items())
    for name in record.unread[0]:
        yield f"field {name!r} {UNUSED_MEDIA}", ""
    for name in record.unread[1]:
        if not _LABEL_NAME.fullmatch(name):
            yield f"field {name!r} {_UNUSED_TEXT}", ""
    own = {"id", ASKED} | {"group"} & fields.named.keys()
    for name in content.keys() - form.used(content, task) - own - fields.columns_beside:
        value, remedy = content[name], "" if name in RECORD_FIELDS else "; name it in source.fields"
        if _holds_media(name, value, used):
            yield f"field {name!r} {UNUSED_MEDIA}{remedy}", _shown(value)
        elif name not in told and (text := _lost_text(name, value, used)):
            yield f"field {name!r} {_UNUSED_TEXT}", _shown(text)
    yield from _odd_answers(content, names, sample)
    for place in fields.missing(content):
        yield f"{place} is not in the record", ""
    if record.paired_media and not sample.media:
        yield "files beside their record are used by no sample: it says that it has none", ""
    yield from _other_marks(sample)


def _odd_answers(content: Content, names: Names, sample: SourceSample) -> Iterator[Lost]:
    """Yield the answers that are trained otherwise than the record has them, or hardly should
    be."""
    if name := names.get("messages"):
        messages = [one for one in content[name] if isinstance(one, Mapping)]
        values = [one.get("value", one.get("content")) for one in messages]
        if any(message.get("mask") for message in messages):
            line = (
                "messages have a 'mask', which is not read; loss_weight: 0 trains none of a message"
            )
            yield line, sample.turns[0].answer[:_EXAMPLE_LENGTH]
    else:
        given = content[name] if (name := names.get("answer")) else None
        values = given if isinstance(given, list) else [given]
    if name == "answers" and len(values) > len(sample.turns):
        line = "of several 'answers' the first is trained; source.fields names another"
        yield line, _shown([str(one) for one in values])
    if scalars := [one for one in values if is_scalar(one)]:
        yield "answers that are numbers, true or false are trained as their text", str(scalars[0])
    weights = [name for name in LOSS_FIELDS if is_scalar(content.get(name, ""))]
    if weights and content[weights[0]] != 1:
        line = f"field {weights[0]!r} of the record is not read; loss weights belong in messages"
        yield line, str(content[weights[0]])
    for turn in sample.turns:
        if _NOTHING.fullmatch(turn.answer) and (turn.answer.strip() or not turn.calls):
            yield "answers are 'null', 'nan' or characters that show nothing", _shown(turn.answer)


def _other_marks(sample: SourceSample) -> Iterator[Lost]:
    what = "captions" if sample.task == "captioning" else "prompts"
    text = shown_text(sample.turns, sample.task)
    if picture := PICTURE.search(text):
        line = f"{what} hold pictures as text that are neither data: URIs nor files of image_root"
        yield line, _shown(picture[0])
    if sample.media and IMAGE_PLACEHOLDER not in text and VIDEO_PLACEHOLDER not in text:
        mark = _OTHER_MARKS.search(text)
        if mark is not None:
            line = f"{what} hold {mark[0]!r} as text; media are marked by {IMAGE_PLACEHOLDER}"
            yield line, _shown(text[mark.start() :])


def control_text(
    sample: SourceSample, control: re.Pattern[str], written: Collection[str]
) -> Iterator[Lost]:
    """Yield the control tokens that a sample's texts spell: those that are `written` around texts,
    as where a template was applied before; and others, under SPELLED and the token."""
    texts = [turn.answer for turn in sample.turns]
    if sample.task != "captioning":
        texts += [sample.system or "", sample.tools]
        for turn in sample.turns:
            said = [text for _, text in turn.before]
            texts += [turn.prompt, turn.thought or "", *turn.calls, *said]
    text = "\n".join(texts)
    first: dict[str, int] = {}
    for match in control.finditer(text):
        first.setdefault(match[0], match.start())
    for token, start in first.items():
        line = f"{SPELLED}{token}"
        if token in written:
            line = f"texts hold {token!r}, trained as text and not as the control token; it is "
            line += "added around texts: take it out"
        yield line, _shown(text[start:])


def clipped_images(images: Mapping[str, str]) -> Iterator[Lost]:
    """Yield the images, by name, whose mode has more than 8 bits for a value: most of what they
    show is lost. Values are not looked at, which would mean decoding."""
    for letter, line in _CLIPPED.items():
        names = [name for name, mode in images.items() if mode.startswith(letter)]
        if names:
            yield f"{line}; save them with 8 bits", _shown(names)


def _holds_media(name: str, value: Any, used: set[str]) -> bool:
    """Tell whether a field names media, or holds them, that are not used."""
    if not value or isinstance(value, bool | int | float):
        return False
    texts = list(_texts(value))
    if any(text.startswith("data:image/") for text in texts):
        return True
    named = [text for text in texts if name in MEDIA_FIELDS or _is_media_name(text)]
    if named:
        # If samples have media, an address is only their origin.
        fresh = [text for text in named if not (used and "://" in text)]
        return not used.issuperset(map(_base_name, fresh))
    return not used and _MEDIA_NAME.fullmatch(name) is not None


def _lost_text(name: str, value: Any, used: set[str]) -> str | None:
    """Find the first text in a field that is neither a name of used media nor a label of the
    record."""
    is_label = _LABEL_NAME.fullmatch(name) is not None
    for text in _texts(value):
        words = text.split()
        if words and not (is_label and len(words) == 1) and not _is_media_name(text):
            return text
    return None


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a field, also in a list, in its objects, or in an object."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for text in value.values() if isinstance(text, str))
    elif isinstance(value, list):
        for one in value[:16]:
            if not isinstance(one, list):
                yield from _texts(one)


def _is_media_name(text: str) -> bool:
    if len(text) > 1024 or "\n" in text:
        return False
    path = re.split("[?#]", text)[0] if "://" in text else text
    return path.rpartition(".")[2].lower() in MEDIA_EXTENSIONS


def _base_name(name: str) -> str:
    return name.rpartition("/")[2]


def _shown(value: Any) -> str:
    """Return the beginning of the first text in a value, on one line; "" without a text."""
    text = next(_texts(value), "")
    return repr(text[:_EXAMPLE_LENGTH]) if text else ""
