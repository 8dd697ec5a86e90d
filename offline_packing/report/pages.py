"""The pages, from the templates beside this file: the text of a dataset can only become
text, whatever it holds, and a page needs nothing outside itself."""

import base64
import io
import itertools
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from offline_packing.report.preview import PackPreview
from offline_packing.report.preview_text import first_words
from offline_packing.report.spelled import MediumPreview
from task_encoders.media.image import decode_image

#: Not allowed in HTML: control characters but tab and newline; surrogates cannot be encoded.
_FORBIDDEN: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_THUMBNAIL: Final = (220, 160)
_NUM_COLOURS: Final = 6
_MAX_LABELS: Final = 9

#: Bar of a drawing, its segments: tokens, class, title.
Bar = list[tuple[float, str, str]]


def render_report(document: dict[str, Any], verdict: str) -> bytes:
    """report.html; sections that need a stage which is not complete are left out."""
    names = ", ".join(dict.fromkeys(source["name"] for source in document["sources"]))
    values: dict[str, Any] = {"names": names, "verdict": verdict, "report": document}
    if document["plan"]:
        values |= {"fill_bands": _used_bands(document["packs"]["fill_bands"]), **_drawn(document)}
        values["mixture"] = _mixture(document["plan"]["mixture"])
    title = f"Packing report: {names} ({document['task']})"
    return _render("report.html", title=title, **values)


def render_packs(packs: Sequence[PackPreview], task: str) -> bytes:
    """Packs as one page: thumbnails, and their text with the trained parts marked."""
    title = f"Preview of {len(packs)} pack{'s' * (len(packs) != 1)} ({task})"
    return _render("preview.html", title=title, packs=packs, segments=_segments)


def _render(template: str, **values: Any) -> bytes:
    return _FORBIDDEN.sub("\ufffd", _environment().get_template(template).render(values)).encode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("offline_packing.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "fmt": format,
        "bytes": _bytes,
        "yaml": lambda value: yaml.safe_dump(value, sort_keys=False, allow_unicode=True),
        "first_words": first_words,
        "thumbnail": _thumbnail,
    }
    environment.globals |= {"round_numbers": _round_numbers, "labelled_edges": _labelled_edges}
    return environment


def _bytes(count: float) -> str:
    """1,234,567 -> '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def _round_numbers(highest: int) -> range:
    """Return at most three round numbers up to the highest count: 870 -> 500; 250 -> 100, 200."""
    power: int = 10 ** (len(str(highest)) - 1)
    steps = (power // 2, power, 2 * power, 5 * power)
    step = next(step for step in steps if step and highest / step < 3)
    return range(step, highest + 1, step)


def _labelled_edges(edges: Sequence[int]) -> list[int]:
    """Edges that are labelled below an axis: powers of two, if there are not too many."""
    places = [i for i, edge in enumerate(edges) if edge & (edge - 1) == 0]
    return places[:: -(-len(places) // _MAX_LABELS)] if places else [0, len(edges) - 1]


def _used_bands(bands: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """Name and packs of each band down to one beyond the last non-empty one."""
    ends = itertools.pairwise(100 * band["at_least"] for band in bands)
    names = ["full", *(f"{low:.4g} – {end:.4g} %" for end, low in ends)]
    counts = [band["packs"] for band in bands]
    last = max(i for i, count in enumerate(counts) if count)
    return list(zip(names, counts, strict=True))[: last + 2]


def _drawn(document: dict[str, Any]) -> dict[str, Any]:
    """Rows of packs and of padded batches, and colours of the samples in them: by source, or by
    kind if there is one source or too many to tell apart."""
    names = [source["name"] for source in document["sources"]]
    by_source = 1 < len(names) <= _NUM_COLOURS
    kinds = names if by_source else ["one image", "text only", "several images"]
    packed: list[Bar] = []
    for pack in document["drawn"]["packs"]:
        packed.append([])
        columns = (pack[name] for name in ("keys", "sources", "tokens", "images"))
        for key, source, tokens, images in zip(*columns, strict=True):
            kind = source if by_source else (1, 0, 2)[min(images, 2)]
            title = f"{pack['key']}: {key}, {tokens:,} tokens, {images} images"
            packed[-1].append((tokens, f"c{kind}", title))
    padded: list[Bar] = [
        [(tokens, "c4", f"{tokens:,} tokens"), (width - tokens, "none", "padding")]
        for tokens, width in document["drawn"]["padded"]
    ]
    used = sorted({class_ for bar in packed for _, class_, _ in bar})
    legend = [(class_, kinds[int(class_[1:])]) for class_ in used]
    return {"packed_rows": packed, "padded_rows": padded, "legend": legend}


def _mixture(stretches: Sequence[Sequence[dict[str, Any]]]) -> list[Bar]:
    """A bar of the sources' shares for each stretch of a plan."""
    title = "{source}: {share:.1%}, asked {asked:.1%}"
    return [
        [(s["share"], f"c{i % _NUM_COLOURS}", title.format_map(s)) for i, s in enumerate(row)]
        for row in stretches
    ]


def _segments(pack: PackPreview) -> Bar:
    bar = []
    for i, sub in enumerate(pack.sub_samples):
        title = f"#{i} {sub.title}: {sub.num_tokens:,} tokens"
        bar.append((sub.num_tokens, f"c{i % _NUM_COLOURS}", title))
    return [*bar, (pack.seq_length - pack.cu_lengths[-1], "none", "empty")]


def _thumbnail(medium: MediumPreview) -> str:
    """A small picture as a data URL."""
    small = decode_image(medium.picture, max_image_pixels=medium.width * medium.height)
    small.thumbnail(_THUMBNAIL, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=75)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
