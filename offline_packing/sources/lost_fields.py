"""Parts of records that no sample uses: counted, and reported once all are measured."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from offline_packing.sources.base import SourceRecord
from offline_packing.sources.options import FieldMap
from task_encoders.packs.pack_format import MEDIA_EXTENSIONS
from task_encoders.records.messages import media_name
from task_encoders.records.record import MEDIA_FIELDS, PROMPT_FIELDS, RECORD_FIELDS
from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    SampleError,
    SourceSample,
)

#: Names that fields with media have: image_2, img_path, video_url, frames.
_MEDIA_NAME: Final = re.compile(
    r"(image|img|picture|photo|video|clip|frame|media|jpe?g|png|webp|mp4)s?"
    r"(_?(path|file|name|url|list|bytes))*s?(_?\d+)?",
    re.IGNORECASE,
)
_RECORD_FIELDS: Final = frozenset(RECORD_FIELDS)
#: Fields next to a prompt that the model should have seen, too.
_BESIDE_PROMPT: Final = ("choices", "options", "hint", "passage", *PROMPT_FIELDS)
#: How other projects mark the place of an image.
_OTHER_MARKS: Final = re.compile(
    r"<\|?(?:ImageHere|image_pad|vision_start|image[_ ]?\d*|img|media|video_pad)\|?>|\[IMG\]",
    re.IGNORECASE,
)


def lost_fields(record: SourceRecord, sample: SourceSample, fields: FieldMap) -> Iterator[str]:
    """A line for each part of a record that its sample lacks."""
    content = record.content
    assert not isinstance(content, SampleError)
    used = {_base_name(name) for name in sample.media}
    others = content.keys() - _RECORD_FIELDS
    unused = [*record.unread]
    unused += [name for name in others if _holds_media(name, content[name], used)]
    for name in MEDIA_FIELDS & content.keys():
        value = content[name] or []
        named = map(media_name, value if isinstance(value, list) else [value])
        if not used.issuperset(_base_name(str(one)) for one in named):
            unused.append(name)
    yield from (f"field {name!r} holds media that no sample uses" for name in unused)
    for place in fields.missing(content):
        yield f"{place} is not in the record"
    if record.paired_media and not sample.media:
        yield "files beside their record are used by no sample: it says that it has none"
    yield from _lost_text(content, sample)


def _lost_text(content: Mapping[str, Any], sample: SourceSample) -> Iterator[str]:
    if content.get("label") is False:
        yield "records say label: false, as preferences mark bad answers"
    prompt = next(filter(content.get, PROMPT_FIELDS), None)
    if prompt is not None and sample.task != "captioning":
        for name in _BESIDE_PROMPT:
            if name != prompt and content.get(name):
                yield f"field {name!r} is not shown beside {prompt!r}"
    answer = next(filter(content.get, ("answer", "answers")), None)
    captions = content.get("captions") or content.get("caption")
    if sample.task == "captioning" and prompt is None and answer and not captions:
        yield f"field {answer!r} is trained as a caption; where is its question?"
    if not sample.media:
        return
    prompts = "\n".join([turn.prompt for turn in sample.turns])
    if IMAGE_PLACEHOLDER not in prompts and VIDEO_PLACEHOLDER not in prompts:
        mark = _OTHER_MARKS.search(prompts)
        if mark is not None:
            yield f"prompts hold {mark[0]!r} as text; media are marked by {IMAGE_PLACEHOLDER}"


def _holds_media(name: str, value: Any, used: set[str]) -> bool:
    """Whether a field names media, or holds them, that are not used."""
    if not value or isinstance(value, bool | int | float):
        return False
    texts = list(_texts(value))
    if any(text.startswith("data:image/") for text in texts):
        return True
    named = [text for text in texts if _is_media_name(text)]
    if named:
        # Where samples have media, an address is where they once came from.
        fresh = [text for text in named if not (used and "://" in text)]
        return not used.issuperset(map(_base_name, fresh))
    return not used and _MEDIA_NAME.fullmatch(name) is not None


def _texts(value: Any) -> Iterator[str]:
    """The texts in a field: of a list, of its objects, of an object."""
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
    path = urlsplit(text).path if "://" in text else text
    return path.rpartition(".")[2].lower() in MEDIA_EXTENSIONS


def _base_name(name: str) -> str:
    return name.rpartition("/")[2]
