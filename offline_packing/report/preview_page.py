"""Packs as one page: thumbnails, and their text with what is trained."""

import base64
import io
from collections.abc import Iterator, Sequence
from typing import Final

from PIL import Image

from offline_packing.report import charts
from offline_packing.report.markup import Content, Element, page, tag
from offline_packing.report.preview import (
    ImagePreview,
    PackPreview,
    Span,
    SubSamplePreview,
    VideoPreview,
)
from offline_packing.report.preview_text import first_words
from offline_packing.report.tables import table
from task_encoders.media.image import decode_image

_THUMBNAIL: Final = (220, 160)
_WORDS: Final = 60
_NUM_COLOURS: Final = 6


def render_packs(packs: Sequence[PackPreview], task: str) -> bytes:
    """The whole page."""
    sections = [section for pack in packs for section in _pack(pack)]
    legend = tag(
        "p",
        "Text with loss is ",
        tag("span", "marked like this", class_="trained"),
        "; control tokens are ",
        tag("span", "<|pale|>", class_="control"),
        ", and the tokens of an image or a video stand as one ",
        tag("span", "[image rows x columns: tokens]", class_="vision"),
        ", rows and columns counted in patches. Of a video the first frame is shown.",
    )
    title = f"Preview of {len(packs)} pack{'s' * (len(packs) != 1)} ({task})"
    return page(title, tag("h1", title), legend, *sections)


def _pack(pack: PackPreview) -> Iterator[Element]:
    tokens = pack.cu_lengths[-1]
    loss = sum(sub.num_loss_tokens for sub in pack.sub_samples)
    yield tag("h2", pack.key)
    yield tag(
        "p",
        f"{pack.shard} ({pack.split}): {tokens:,} of {pack.seq_length:,} tokens, "
        f"{pack.fill:.1%} full, {loss:,} with loss ({loss / tokens:.1%})",
        class_="pale",
    )
    segments = [
        (
            sub.num_tokens,
            f"c{i % _NUM_COLOURS}",
            f"#{i} {sub.sample.key}: {sub.num_tokens:,} tokens",
        )
        for i, sub in enumerate(pack.sub_samples)
    ]
    empty = (pack.seq_length - tokens, "none", "empty")
    yield charts.stacked_rows([[*segments, empty]], pack.seq_length, "sub-samples")
    lines: list[Sequence[Content]] = [
        [
            tag("td", f"#{i} ", tag("code", sub.sample.key), class_="name"),
            f"{sub.num_tokens:,}",
            f"{sub.num_loss_tokens:,}",
            f"{len(sub.sample.turns):,}",
            f"{len(sub.images):,}",
            f"{len(sub.videos):,}",
            tag("td", first_words(sub.sample.turns[0].prompt, _WORDS), class_="name"),
            tag("td", first_words(sub.sample.turns[0].answer, _WORDS), class_="name"),
        ]
        for i, sub in enumerate(pack.sub_samples)
    ]
    names = ("sub-sample", "tokens", "loss", "turns", "images", "videos", "prompt", "answer")
    yield table(names, lines)
    yield tag("p", "cu_lengths ", tag("code", str(list(pack.cu_lengths))))
    for line in pack.dropped:
        yield tag("p", f"dropped: {line}")
    for i, sub in enumerate(pack.sub_samples):
        yield from _sub_sample(i, sub)


def _sub_sample(number: int, sub: SubSamplePreview) -> Iterator[Element]:
    yield tag(
        "h3",
        f"#{number} ",
        tag("code", sub.sample.key),
        f" – {sub.num_tokens:,} tokens, {sub.num_loss_tokens:,} with loss",
    )
    if sub.images or sub.videos:
        thumbnails = [*map(_image, sub.images), *map(_video, sub.videos)]
        yield tag("div", *thumbnails, class_="thumbs")
    yield tag("div", *map(_span, sub.spans), class_="text")


def _span(span: Span) -> Element:
    pieces = [
        tag("span", piece.text, class_=piece.kind) if piece.kind != "text" else piece.text
        for piece in span.pieces
    ]
    loss = "with" if span.trained else "without"
    title = f"{span.num_tokens:,} tokens {loss} loss"
    return tag("span", *pieces, title=title, **({"class_": "trained"} if span.trained else {}))


def _image(image: ImagePreview) -> Element:
    return _thumbnail(image, image.data, "")


def _video(video: VideoPreview) -> Element:
    return _thumbnail(video, video.first, f"{video.num_frames} frames of ")


def _thumbnail(medium: ImagePreview | VideoPreview, picture: bytes, what: str) -> Element:
    _, rows, columns = medium.grid
    return tag(
        "figure",
        tag("img", src=_small_jpeg(picture, medium.width * medium.height), alt=medium.name),
        tag(
            "figcaption",
            f"{medium.name}: {what}{medium.width}x{medium.height} pixels, {rows}x{columns} patches",
        ),
    )


def _small_jpeg(data: bytes, num_pixels: int) -> str:
    """An image file as a data URL."""
    thumbnail = decode_image(data, max_image_pixels=num_pixels)
    thumbnail.thumbnail(_THUMBNAIL, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    thumbnail.save(buffer, "JPEG", quality=75)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
