"""Sub-samples of samples that are not packs: Energon's own types, crude ones, and your own.

A sample's fields are a record in one of the forms of `records.record`, and its fields `image`,
`images`, `video` and `videos` are the media, as bytes:

    CaptioningSample(image, caption)           MultiMixQASample(messages, image, video, system)
    VQASample(image, context, answers)         any dataclass with `messages`, or with texts as above

A crude sample holds a .json, or a caption as .txt, and media, which the JSON names by member, or
does not name at all; as in a WebDataset that is packed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from megatron.energon import CrudeSample, Sample, basic_sample_keys, stateless
from megatron.energon.errors import FatalSampleError

from task_encoders.energon_samples import CrudeRecord
from task_encoders.packs.pack import SubSample
from task_encoders.packs.pack_format import MEDIA_EXTENSIONS, extension_of, is_video_name
from task_encoders.records.forms import MEDIA_FIELDS, best_answer, form_of, has_answer
from task_encoders.records.record import decode_inline, decode_text, is_inline, load_json, to_sample
from task_encoders.samples import SampleError

_TEXT_PARTS: Final = ("txt", "caption", "text")
_Media = dict[str, Any]


@stateless
def cook(sample: CrudeSample) -> CrudeRecord:
    """Take a sample of a folder that is declared as CrudeWebdataset, a pack or not."""
    parts = {part: value for part, value in sample.items() if not part.startswith("__")}
    return CrudeRecord(**basic_sample_keys(sample), parts=parts)


def is_pack(record: Any, *, packed: bool) -> bool:
    """Tell whether a crude sample's JSON is a pack's: a list of captions, and one equally long.

    Args:
        packed: the answer for a single caption in a list, which may be either, and for JSON that
            cannot be parsed.
    """
    if isinstance(record, bytes):
        try:
            record = orjson.loads(record)
        except orjson.JSONDecodeError:
            return packed
    captions = record.get("captions") if isinstance(record, Mapping) else None
    if not isinstance(captions, list) or any(isinstance(one, Mapping) for one in captions):
        return False
    if "meta" in record or any(isinstance(one, list) for one in captions):
        return True
    lists = (record.get(name) for name in ("prompt", "prompts", "images", "videos"))
    aligned = any(isinstance(one, list) and len(one) == len(captions) for one in lists)
    return aligned and (packed or len(captions) > 1)


def unpacked_sub_sample(sample: Sample) -> SubSample:
    """Return the only sub-sample of an unpacked sample.

    Raises:
        FatalSampleError: its media are decoded already.
    """
    try:
        if isinstance(sample, CrudeRecord):
            record, media = _of_parts(sample.parts)
        else:
            record, media = _of_type(sample)
        task = form_of(record).task  # as no configuration says it
        paired = tuple(media) if media or task == "captioning" else None
        found = to_sample(record, sample.__key__, task, paired, lambda name: False)
        stem = sample.__key__.rpartition("/")[2]
        images, videos = _files(found.images, media, stem), _files(found.videos, media, stem)
        return SubSample(sample.__key__, found, images, videos)
    except SampleError as error:
        return SubSample(sample.__key__, error)


def _of_type(sample: Sample) -> tuple[dict[str, Any], _Media]:
    """Take record and media from the fields of a typed sample."""
    record: dict[str, Any] = {"images": [], "videos": []}
    media: _Media = {}
    for field in dataclasses.fields(sample):
        value = getattr(sample, field.name)
        if field.name in MEDIA_FIELDS:
            kind, extension = ("images", "jpg") if "image" in field.name else ("videos", "mp4")
            for data in value if isinstance(value, list | tuple) else [value]:
                if data is None:
                    continue
                if not isinstance(data, bytes):
                    raise FatalSampleError(
                        f"{field.name!r} of sample {sample.__key__!r} is a {type(data).__name__}; "
                        "the task encoder takes the bytes of the file: leave its `decoder` as it is"
                    )
                name = f"{len(media)}.{extension}"  # the field does not name it
                record[kind].append(name)
                media[name] = data
        elif not field.name.startswith("__"):
            record[field.name] = decode_text(value) if isinstance(value, bytes) else value
    if "answers" in record:
        record["answers"] = best_answer(record["answers"], record.get("answer_weights"))
    return record, media


def _of_parts(parts: Mapping[str, Any]) -> tuple[Mapping[str, Any], _Media]:
    """Take record and media from the members of a crude sample."""
    media = {part: data for part, data in parts.items() if extension_of(part) in MEDIA_EXTENSIONS}
    content = next((parts[part] for part in sorted(parts) if extension_of(part) == "json"), None)
    record = load_json(content) if isinstance(content, bytes) else content
    text = next((parts[part] for part in _TEXT_PARTS if part in parts), None)
    if text is not None and (record is None or not has_answer(record)):
        return {"caption": decode_text(text)}, media
    if not isinstance(record, Mapping):
        raise SampleError("bad_record", f"no .json and no .txt among {', '.join(parts)}"[:200])
    return record, media


def _files(names: Sequence[str], media: _Media, stem: str) -> tuple[bytes, ...]:
    """Return the media with these names, all images or all videos."""
    if not names:
        return ()
    of_kind = [part for part in media if is_video_name(part) == is_video_name(names[0])]
    if len(names) == len(of_kind) == 1:
        return (media[of_kind[0]],)
    by_name = {name: media[part] for part in of_kind for name in (part, f"{stem}.{part}")}
    by_name |= {name: decode_inline(name) for name in names if is_inline(name)}
    missing = next((name for name in names if name not in by_name), None)
    if missing is not None:
        raise SampleError("missing_image", f"no member {missing!r}")
    return tuple(by_name[name] for name in names)
