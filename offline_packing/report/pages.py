"""The pages, from the templates beside this file: the text of a dataset can only become
text, whatever it holds, and a page needs nothing outside itself."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from offline_packing.report.preview import PackPreview
from offline_packing.report.preview_text import first_words
from offline_packing.report.spelled import MediumPreview
from offline_packing.runs.figures import Figure
from task_encoders.media.image import decode_image

#: Not allowed in HTML: control characters but tab and newline; surrogates cannot be encoded.
_FORBIDDEN: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_THUMBNAIL: Final = (220, 160)
_NUM_COLOURS: Final = 6

#: Bar of a drawing, its segments: tokens, class, title.
Bar = list[tuple[float, str, str]]


def render_report(
    document: dict[str, Any], sections: Mapping[str, Sequence[Figure]], sources: Sequence[str]
) -> bytes:
    """Render report.html: the figures by section, drawn packs, and the settings of the run."""
    title = f"Packing report: {', '.join(dict.fromkeys(sources))}"
    drawn = _drawn(document["drawn"], sources) if document["drawn"] else None
    return _render("report.html", title=title, report=document, sections=sections, drawn=drawn)


def render_packs(packs: Sequence[PackPreview], task: str) -> bytes:
    """Render packs as one page: thumbnails, and the text with the trained parts marked."""
    title = f"Preview of {len(packs)} pack{'s' * (len(packs) != 1)} ({task})"
    return _render("preview.html", title=title, packs=packs, segments=_segments)


def _render(template: str, **values: Any) -> bytes:
    return _FORBIDDEN.sub("\ufffd", _ENVIRONMENT.get_template(template).render(values)).encode()


def _drawn(packs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return rows of packs, and colours of the samples in them: by source, or by kind if there is
    one source or too many to tell apart."""
    by_source = 1 < len(names) <= _NUM_COLOURS
    kinds = names if by_source else ["one image", "text only", "several images"]
    rows: list[Bar] = []
    for pack in packs:
        rows.append([])
        columns = (pack[name] for name in ("keys", "sources", "tokens", "images"))
        for key, source, tokens, images in zip(*columns, strict=True):
            kind = source if by_source else (1, 0, 2)[min(images, 2)]
            title = f"{pack['key']}: {key}, {tokens:,} tokens, {images} images"
            rows[-1].append((tokens, f"c{kind}", title))
    used = sorted({class_ for bar in rows for _, class_, _ in bar})
    return {"rows": rows, "legend": [(class_, kinds[int(class_[1:])]) for class_ in used]}


def _segments(pack: PackPreview) -> Bar:
    bar = []
    for i, sub in enumerate(pack.sub_samples):
        title = f"#{i} {sub.title}: {sub.num_tokens:,} tokens"
        bar.append((sub.num_tokens, f"c{i % _NUM_COLOURS}", title))
    return [*bar, (pack.seq_length - pack.cu_lengths[-1], "none", "empty")]


def _thumbnail(medium: MediumPreview) -> str:
    """Return a small picture as a data URL."""
    small = decode_image(medium.picture, max_image_pixels=medium.width * medium.height)
    small.thumbnail(_THUMBNAIL, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=75)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


_ENVIRONMENT: Final = Environment(
    loader=PackageLoader("offline_packing.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "fmt": format,
    "yaml": lambda value: yaml.safe_dump(value, sort_keys=False, allow_unicode=True),
    "first_words": first_words,
    "thumbnail": _thumbnail,
}
