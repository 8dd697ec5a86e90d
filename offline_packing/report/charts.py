"""Charts as inline SVG. Across they are drawn in percent and down in pixels, so that they fit any
width with text of one size; colours are classes of page.html, for light, dark and print."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from offline_packing.report.markup import Element, tag

_HEIGHT: Final = 200
_LOW_HEIGHT: Final = 140
_TOP: Final = 22  # room for the highest figure
_AXIS: Final = 24  # room for the figures below
_ROW: Final = 15
_MAX_TICKS: Final = 9
_MAX_LABELS: Final = 14
_MAX_COUNTS: Final = 10


def svg(height: float, *children: Element | None, label: str) -> Element:
    """A chart as wide as what it stands in; `label` is read to those who cannot see it."""
    return tag("svg", *children, width="100%", height=height, role="img", aria_label=label)


def percent(share: float) -> str:
    """A length along the width."""
    return f"{100 * share:.4g}%"


def log_histogram(
    edges: Sequence[int], counts: Sequence[int], seq_length: int, label: str
) -> Element:
    """Columns of equal width for bins of growing width, a line where sequences end.

    Args:
        edges: (n + 1) ascending; bin i holds edges[i] < value <= edges[i + 1].
        counts: (n,).
    """
    highest, width = max(counts), 1 / len(counts)
    total, bottom = sum(counts), _TOP + _HEIGHT
    marks = _gridlines(counts, bottom, _HEIGHT)
    for i, count in enumerate(counts):
        height = _HEIGHT * count / highest
        title = f"{edges[i] + 1:,} – {edges[i + 1]:,} tokens: {count:,} ({count / total:.1%})"
        marks.append(
            tag(
                "rect",
                tag("title", title),
                x=percent((i + 0.06) * width),
                y=bottom - height,
                width=percent(0.88 * width),
                height=height,
                class_="over" if edges[i] >= seq_length else "bar",
            )
        )
    return svg(
        bottom + _AXIS,
        *marks,
        *_edge_labels(edges, bottom),
        *_limit(edges, seq_length, bottom),
        label=label,
    )


def _gridlines(counts: Sequence[int], bottom: float, height: float) -> list[Element]:
    """Lines at round numbers, their values at the end where the columns are lower."""
    highest = max(counts)
    step = 10 ** (len(str(highest)) - 1)
    step = next(s for s in (step // 2, step, 2 * step, 5 * step) if s and highest / s < 3)
    third = -(-len(counts) // 3)
    left = max(counts[:third]) <= max(counts[-third:])
    place = {"x": 0, "text_anchor": "start"} if left else {"x": "100%", "text_anchor": "end"}
    marks = []
    for value in range(step, highest + 1, step):
        y = bottom - height * value / highest
        marks.append(tag("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        marks.append(tag("text", f"{value:,}", **place, y=y - 4, class_="small"))
    return marks


def _edge_labels(edges: Sequence[int], bottom: float) -> list[Element]:
    """Values below the axis: powers of two, where there are not too many."""
    places = [i for i, edge in enumerate(edges) if edge & (edge - 1) == 0]
    places = places[:: -(-len(places) // _MAX_TICKS)] if places else [0, len(edges) - 1]
    last = len(edges) - 1
    marks = [tag("line", x1=0, x2="100%", y1=bottom, y2=bottom, class_="axis")]
    for i in places:
        anchor = "start" if i == 0 else "end" if i == last else "middle"
        marks.append(
            tag("text", f"{edges[i]:,}", x=percent(i / last), y=bottom + 16, text_anchor=anchor)
        )
    return marks


def _limit(edges: Sequence[int], seq_length: int, bottom: float) -> list[Element]:
    """Where sequences end, if there is anything beyond."""
    if seq_length not in edges[:-1]:
        return []
    x = percent(edges.index(seq_length) / (len(edges) - 1))
    return [
        tag("line", x1=x, x2=x, y1=0, y2=bottom, class_="limit"),
        tag("text", f"seq_length {seq_length:,}", x=x, dx=-6, y=12, text_anchor="end"),
    ]


def bars(rows: Sequence[tuple[str, int]], label: str) -> Element:
    """One row per name: the name, a bar, its value and share. For few rows."""
    highest, total = max(value for _, value in rows) or 1, sum(value for _, value in rows) or 1
    marks = []
    for i, (name, value) in enumerate(rows):
        y = i * (_ROW + 7)
        width = 0.55 * value / highest
        marks += [
            tag("text", name, x=percent(0.2), dx=-8, y=y + _ROW - 3, text_anchor="end"),
            tag("rect", x=percent(0.2), y=y, width=percent(width), height=_ROW, class_="bar"),
            tag(
                "text",
                f"{value:,} ({value / total:.1%})",
                x=percent(0.2 + width),
                dx=6,
                y=y + _ROW - 3,
                class_="" if value else "small",
            ),
        ]
    return svg(len(rows) * (_ROW + 7), *marks, label=label)


def columns(edges: Sequence[int], counts: Sequence[int], label: str) -> Element:
    """Columns for bins of whole numbers of equal width, with counts above where there is room.

    Args:
        edges: (n + 1); bin i holds edges[i] <= value < edges[i + 1].
        counts: (n,).
    """
    highest, width, total = max(counts), 1 / len(counts), sum(counts)
    bottom = _TOP + _LOW_HEIGHT
    every = -(-len(counts) // _MAX_LABELS)
    marks = [] if len(counts) <= _MAX_COUNTS else _gridlines(counts, bottom, _LOW_HEIGHT)
    for i, count in enumerate(counts):
        height = _LOW_HEIGHT * count / highest
        middle = percent((i + 0.5) * width)
        wide = edges[i + 1] - edges[i] > 1
        name = f"{edges[i]:,} – {edges[i + 1] - 1:,}" if wide else f"{edges[i]:,}"
        marks.append(
            tag(
                "rect",
                tag("title", f"{name} samples: {count:,} packs ({count / total:.1%})"),
                x=percent((i + 0.06) * width),
                y=bottom - height,
                width=percent(0.88 * width),
                height=height,
                class_="bar",
            )
        )
        if count and len(counts) <= _MAX_COUNTS:
            y = bottom - height - 5
            text = f"{count:,}"
            marks.append(tag("text", text, x=middle, y=y, text_anchor="middle", class_="small"))
        if i % every == 0:
            text = f"{edges[i]:,}"
            marks.append(tag("text", text, x=middle, y=bottom + 16, text_anchor="middle"))
    marks.append(tag("line", x1=0, x2="100%", y1=bottom, y2=bottom, class_="axis"))
    return svg(bottom + _AXIS, *marks, label=label)


def range_bar(spread: Mapping[str, Any]) -> Element:
    """From the smallest to the largest, thick from p5 to p95, a gap at the median; 0 is left."""
    scale = spread["max"] or 1
    low, p5, p50, p95 = (spread[name] / scale for name in ("min", "p5", "p50", "p95"))
    return svg(
        16,
        tag("line", x1=percent(low), x2="100%", y1=8, y2=8, class_="range"),
        tag("rect", x=percent(p5), width=percent(p95 - p5), y=3, height=10, class_="bar"),
        tag("line", x1=percent(p50), x2=percent(p50), y1=0, y2=16, class_="median"),
        label="smallest to largest, p5 to p95, median",
    )


def stacked_rows(rows: Sequence[Sequence[tuple[int, str, str]]], width: int, label: str) -> Element:
    """One bar per row, of (tokens, class, title) each.

    Args:
        width: tokens that the whole width stands for.
    """
    marks = []
    for i, segments in enumerate(rows):
        start = 0
        for tokens, class_, title in segments:
            marks.append(
                tag(
                    "rect",
                    tag("title", title),
                    x=percent(start / width),
                    y=i * _ROW,
                    width=percent(tokens / width),
                    height=_ROW - 3,
                    class_=f"segment {class_}",
                )
            )
            start += tokens
    return svg(len(rows) * _ROW, *marks, label=label)


def legend(entries: Sequence[tuple[str, str]]) -> Element:
    """A square and a name per class."""
    items = [
        tag(
            "span",
            tag("svg", tag("rect", width=12, height=12, class_=class_), aria_hidden="true"),
            name,
        )
        for class_, name in entries
    ]
    return tag("div", *items, class_="legend")
