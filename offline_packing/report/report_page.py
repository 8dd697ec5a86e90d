"""report.html: the document of a report as a page for people."""

from collections.abc import Sequence
from typing import Any, Final

import yaml

from offline_packing.report import charts
from offline_packing.report.document import Document
from offline_packing.report.markup import Content, Element, page, tag
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


def render_page(document: Document) -> bytes:
    """The whole page; sections that need a stage which is not complete are left out."""
    sources = ", ".join(source["name"] for source in document["sources"])
    sections = [
        *_head(document, sources),
        *_saving(document),
        *_lengths(document),
        *_packs(document),
        *_spread(document),
        *_sources(document),
        *_set_aside(document),
        *_overlong(document),
        *_shards(document),
        *_drawn(document),
        *_origin(document),
    ]
    return page(f"Packing report: {sources} ({document['task']})", *sections)


def verdict(document: Document) -> str:
    """What became of the samples, in one line."""
    samples, plan = document["samples"], document["plan"]
    if plan is None:
        usable = samples["found"] - samples["set_aside"]
        return (
            f"{samples['found']:,} samples = {usable:,} measured + {samples['set_aside']:,} set "
            "aside; no packs yet: run plan"
        )
    above = plan["packs"] - plan["lower_bound"]
    line = (
        f"{samples['found']:,} samples = {samples['packed']:,} packed + "
        f"{samples['set_aside']:,} set aside; {plan['packs']:,} packs, "
        f"{above:,} above the lower bound; {plan['fill']:.2%} full"
    )
    return line if document["stages"]["write"] else f"{line}; not written yet: run write"


def _head(document: Document, sources: str) -> list[Element]:
    plan, saving = document["plan"], document["saving"]
    head = [
        tag("h1", f"Packing report: {sources}"),
        tag(
            "p",
            f"{document['task']}, sequences of {document['seq_length']:,} tokens",
            *([f", strategy {plan['strategy']}"] if plan else []),
            class_="pale",
        ),
        tag("p", tag("strong", verdict(document)), class_="verdict"),
    ]
    if plan is None:
        return head
    tiles = [
        (f"{plan['fill']:.2%}", "of all sequences is filled"),
        (f"{saving['speedup']:.2f} ×", "speed-up over padding, by tokens"),
        (f"{plan['packing_factor']:.2f}", "samples per pack"),
        (f"{document['loss']['share']:.1%}", "of the tokens carry loss"),
        (f"{plan['gap']:.2%}", "more packs than the lower bound"),
    ]
    return [*head, tag("div", *(tag("div", tag("b", b), t) for b, t in tiles), class_="tiles")]


def _saving(document: Document) -> list[Element]:
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


def _lengths(document: Document) -> list[Element]:
    lengths, seq_length = document["lengths"], document["seq_length"]
    if lengths is None:
        return []
    figures = ", ".join(f"{name} {lengths[name]:,.0f}" for name in ("p5", "p50", "p95", "max"))
    return [
        tag("h2", "Samples by tokens"),
        tag("p", f"All measured samples; mean {lengths['mean']:,.1f}, {figures}.", class_="pale"),
        charts.log_histogram(lengths["edges"], lengths["counts"], seq_length, "samples by tokens"),
    ]


def _packs(document: Document) -> list[Element]:
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


def _spread(document: Document) -> list[Element]:
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


def _sources(document: Document) -> list[Element]:
    lines: list[Sequence[Content]] = []
    for source in document["sources"]:
        used = f"weight {source['weight']:g}" if source["weight"] else f"{source['repeat']:g}"
        appended = f"append {source['generation']}: " if source["generation"] else ""
        lines.append(
            [
                tag(
                    "td",
                    f"{appended}{source['name']}",
                    tag("div", f"{source['format']}: {source['path']}", class_="pale"),
                    class_="name",
                ),
                f"{source['samples']:,}",
                f"{source['set_aside']:,}",
                f"{source['tokens']:,}",
                f"{source['share_of_tokens']:.1%}",
                f"{source['loss_tokens'] / (source['tokens'] or 1):.1%}",
                f"{source['images']:,}",
                used,
            ]
        )
    unused = document["unused_images"]
    names = ("", "samples", "set aside", "tokens", "share", "with loss", "images", "repeat")
    note = tag("p", f"{unused:,} image files are used by no sample.") if unused else None
    return [tag("h2", "Sources"), table(names, lines), *([] if note is None else [note])]


def _set_aside(document: Document) -> list[Element]:
    reasons = document["set_aside"]
    title = tag("h2", "Set aside")
    if not reasons:
        return [title, tag("p", "Nothing: every sample can be used.")]
    found = document["samples"]["found"]
    lines: list[Sequence[Content]] = []
    for entry in reasons:
        examples = [
            tag("div", tag("code", example["key"]), " ", tag("span", example["detail"]))
            for example in entry["examples"]
        ]
        more = entry["samples"] - len(examples)
        lines.append(
            [
                tag(
                    "td",
                    tag("code", entry["reason"]),
                    tag("div", entry["explanation"], class_="pale"),
                    class_="name",
                ),
                f"{entry['samples']:,}",
                f"{entry['samples'] / found:.2%}",
                tag(
                    "td",
                    *examples,
                    tag("div", f"and {more:,} more", class_="pale") if more else None,
                    class_="name",
                ),
            ]
        )
    return [title, table(("reason", "samples", "of all", "for example"), lines)]


def _overlong(document: Document) -> list[Element]:
    overlong = document["overlong"]
    if not overlong["samples"]:
        return []
    all_tokens = document["loss"]["tokens"]
    if document["plan"]:  # before, the overlong ones are counted in
        all_tokens += overlong["tokens"]
    lines: list[Sequence[Content]] = [
        [
            f"{longer['seq_length']:,}",
            f"{longer['samples']:,}",
            f"{longer['tokens']:,}",
            f"{longer['tokens'] / overlong['tokens']:.1%}",
        ]
        for longer in overlong["saved_by"]
    ]
    return [
        tag("h2", "Too long for a sequence"),
        tag(
            "p",
            f"{overlong['samples']:,} samples with {overlong['tokens']:,} tokens, "
            f"{overlong['tokens'] / all_tokens:.1%} of all, are longer than "
            f"{document['seq_length']:,}; the longest has {overlong['longest']:,}.",
        ),
        table(("with seq_length", "samples kept", "tokens", "of what is lost"), lines),
    ]


def _shards(document: Document) -> list[Element]:
    if document["shards"] is None:
        return []
    lines: list[Sequence[Content]] = [
        [
            line["split"],
            f"{line['shards']:,}",
            f"{line['packs']:,}",
            f"{line['min_packs']:,} – {line['max_packs']:,}",
            f"{line['samples']:,}",
            f"{line['tokens']:,}",
            _bytes(line["bytes"]),
            f"{_bytes(line['min_bytes'])} – {_bytes(line['max_bytes'])}",
        ]
        for line in document["shards"]
    ]
    names = ("split", "shards", "packs", "per shard", "samples", "tokens", "size", "per shard")
    return [tag("h2", "Shards"), table(names, lines)]


def _bytes(count: float) -> str:
    """1,234,567 -> '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def _drawn(document: Document) -> list[Element]:
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


def _origin(document: Document) -> list[Element]:
    parts = [tag("h2", "Made from")]
    for number, origin in enumerate(document["origin"]):
        title = f"append {number}: " if number else ""
        lines = [[name, tag("code", str(value))] for name, value in origin["fingerprint"].items()]
        config = yaml.safe_dump(origin["config"], sort_keys=False, allow_unicode=True)
        parts += [
            tag("details", tag("summary", f"{title}configuration"), tag("pre", config)),
            tag(
                "details",
                tag("summary", f"{title}fingerprint"),
                table(("field", "value"), lines, numbers_from=None),
            ),
        ]
    versions = ", ".join(f"{k} {v}" for k, v in sorted(document["library_versions"].items()))
    return [*parts, tag("p", f"Measured with {versions}.", class_="pale")]
