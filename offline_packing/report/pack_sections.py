"""Sections of the report on packs: what they save, how full and how unequal they are."""

from collections.abc import Sequence
from typing import Any, Final

from offline_packing.report import charts
from offline_packing.report.document import Document
from offline_packing.report.markup import Content, Element, tag
from offline_packing.report.tables import table

#: What is summed up per pack: its name here, and what it decides.
_QUANTITIES: Final = {
    "tokens": ("tokens", "memory, linear layers"),
    "attention": ("sum of squared lengths", "attention"),
    "vision_patches": ("vision patches", "vision tower"),
    "images": ("images", ""),
    "samples": ("samples", ""),
    "operations": ("forward operations", "Qwen2-VL-7B, vision tower included"),
}
_NUM_COLOURS: Final = 6


def saving_section(document: Document) -> list[Element]:
    """Cost of padding, and of packing while training, against these packs."""
    saving, plan = document["saving"], document["plan"]
    if saving is None:
        return []
    packed = saving["tokens_in_packs"]
    rows = [
        (
            f"batches of {saving['padded_batch_size']} padded to their longest",
            saving["tokens_in_padded_batches"],
        ),
        ("every sample padded to seq_length", saving["tokens_padded_to_seq_length"]),
    ]
    lines: list[Sequence[Content]] = [
        [name, f"{tokens:,.0f}", f"{1 - saving['tokens'] / tokens:.1%}", f"{tokens / packed:.2f} ×"]
        for name, tokens in rows
    ]
    for online in saving["online"]:
        lines.append(
            [
                f"packed while training, buffer of {online['buffer']:,} samples",
                "",
                f"{1 - online['fill']:.1%}",
                f"{plan['fill'] / online['fill']:.2f} ×",
            ]
        )
    lines.append(["these packs", f"{packed:,}", f"{1 - plan['fill']:.2%}", "1"])
    before, after = saving["iterations_before"], saving["iterations_after"]
    batch = saving["global_batch_size"]
    tried = saving["online"][0]["samples"]
    return [
        tag("h2", "What packing saves"),
        table(("", "tokens per epoch", "empty", "cost"), lines),
        tag(
            "p",
            f"{before:,} → {after:,} iterations per epoch at global batch size {batch:,}; global "
            f"batch size {saving['equal_batch_size']:,} keeps the samples per step. Cost is in "
            "multiples of these packs, by tokens, or by sequences where those are packed; what a "
            "trainer gains depends on its attention kernel. A buffer is packed "
            f"first-fit-decreasing, tried on {tried:,} samples in random order.",
            class_="pale",
        ),
    ]


def pack_section(document: Document) -> list[Element]:
    """Packs by fill and by number of samples."""
    packs = document["packs"]
    if packs is None:
        return []
    samples = packs["samples_per_pack"]
    bands = _used_bands(packs["fill_bands"])
    return [
        tag(
            "div",
            tag(
                "div",
                tag("h2", "Packs by fill"),
                charts.bars(bands, "packs by share of seq_length"),
            ),
            tag(
                "div",
                tag("h2", "Packs by number of samples"),
                charts.columns(samples["edges"], samples["counts"], "packs by samples"),
            ),
            class_="two",
        )
    ]


def _used_bands(bands: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """Names and packs of the bands down to the last that holds any, and of one more."""
    bands = [{**band, "at_least": 100 * band["at_least"]} for band in bands]
    ends = [None, *(band["at_least"] for band in bands)]
    named = [
        ("full" if end is None else f"{band['at_least']:.4g} – {end:.4g} %", band["packs"])
        for band, end in zip(bands, ends, strict=False)
    ]
    last = max(i for i, (_, count) in enumerate(named) if count)
    return named[: last + 2]


def spread_section(document: Document) -> list[Element]:
    """How unequal the work of packs is, and how long ranks wait for it."""
    packs = document["packs"]
    if packs is None:
        return []
    lines: list[Sequence[Content]] = []
    for name, (title, meaning) in _QUANTITIES.items():
        spread = packs["spread"][name]
        if spread["max"]:
            half = spread["p50"]
            lines.append(
                [
                    tag("td", title, tag("div", meaning, class_="pale")),
                    *(_figure(spread[point]) for point in ("p50", "p95", "max")),
                    f"{spread['max'] / half:.2f}" if half else "–",
                    tag("td", charts.range_bar(spread), class_="range-cell"),
                ]
            )
    waiting = packs["waiting"]
    order = "pack.order evens that out" if waiting["ordered"] else "pack.order would even that out"
    return [
        tag("h2", "Work per pack"),
        tag(
            "p",
            "Ranks wait for the one with the most expensive pack. Packs hold equally many tokens, "
            "but attention costs the square of each sample's length, and the vision tower has its "
            "own load.",
            class_="pale",
        ),
        table(("", "p50", "p95", "max", "max / p50", "min · p5 ▬ p95 · max"), lines),
        tag(
            "p",
            f"In the order written, {waiting['num_ranks']} ranks (loader workers: "
            f"{waiting['num_workers']}) wait {waiting['share']:.1%} of the time for the slowest, "
            f"by forward operations; {order}.",
        ),
    ]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value < 1e12 else f"{value / 1e12:,.1f} T"


def drawn_section(document: Document) -> list[Element]:
    """Some packs, beside samples in padded batches."""
    drawn = document["drawn"]
    if drawn is None:
        return []
    names = [source["name"] for source in document["sources"] if not source["generation"]]
    by_source = 1 < len(names) <= _NUM_COLOURS
    kinds = names if by_source else ["one image", "text only", "several images"]
    of_images = (1, 0, 2)  # kind by number of images
    packed = [
        [
            (
                tokens,
                f"c{source if by_source else of_images[min(images, 2)]}",
                f"{pack['key']}: {key}, {tokens:,} tokens, {images} images",
            )
            for key, source, tokens, images in zip(
                pack["keys"], pack["sources"], pack["tokens"], pack["images"], strict=True
            )
        ]
        for pack in drawn["packs"]
    ]
    padded = [
        [(tokens, "c4", f"{tokens:,} tokens"), (width - tokens, "none", "padding")]
        for tokens, width in drawn["padded"]
    ]
    seq_length = document["seq_length"]
    size = document["saving"]["padded_batch_size"]
    used = sorted({class_ for row in packed for _, class_, _ in row})
    legend = [(class_, kinds[int(class_[1:])]) for class_ in used]
    return [
        tag("h2", "Some packs"),
        tag(
            "div",
            tag(
                "div",
                tag("h3", f"Packed: {len(packed)} of {document['plan']['packs']:,} packs"),
                charts.legend(legend),
                charts.stacked_rows(packed, seq_length, "sub-samples of some packs"),
            ),
            tag(
                "div",
                tag("h3", f"Padded: {len(padded)} samples in batches of {size}"),
                charts.legend([("c4", "sample"), ("none", "padding")]),
                charts.stacked_rows(padded, seq_length, "samples padded to the longest"),
            ),
            class_="two",
        ),
        tag(
            "p",
            f"The width is {seq_length:,} tokens. preview shows what is in a pack.",
            class_="pale",
        ),
    ]
