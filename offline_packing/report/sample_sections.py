"""Sections of the report on samples: lengths, sources, what was set aside, and the shards."""

from collections.abc import Sequence

from offline_packing.report import charts
from offline_packing.report.document import Document
from offline_packing.report.markup import Content, Element, tag
from offline_packing.report.tables import table


def length_section(document: Document) -> list[Element]:
    """Lengths of all measured samples."""
    lengths, seq_length = document["lengths"], document["seq_length"]
    if lengths is None:
        return []
    figures = ", ".join(f"{name} {lengths[name]:,.0f}" for name in ("p5", "p50", "p95", "max"))
    return [
        tag("h2", "Samples by tokens"),
        tag("p", f"All measured samples; mean {lengths['mean']:,.1f}, {figures}.", class_="pale"),
        charts.log_histogram(lengths["edges"], lengths["counts"], seq_length, "samples by tokens"),
    ]


def source_section(document: Document) -> list[Element]:
    """One line per source."""
    lines: list[Sequence[Content]] = []
    for source in document["sources"]:
        used = f"weight {source['weight']:g}" if source["weight"] else f"{source['repeat']:g}"
        lines.append(
            [
                tag(
                    "td",
                    source["name"],
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


def set_aside_section(document: Document) -> list[Element]:
    """One line per reason, with examples."""
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


def overlong_section(document: Document) -> list[Element]:
    """What longer sequences would keep."""
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


def shard_section(document: Document) -> list[Element]:
    """One line per split."""
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
