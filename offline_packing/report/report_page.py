"""report.html: the document of a report as a page for people."""

import yaml

from offline_packing.report.document import Document
from offline_packing.report.markup import Element, page, tag
from offline_packing.report.pack_sections import (
    drawn_section,
    pack_section,
    saving_section,
    spread_section,
)
from offline_packing.report.sample_sections import (
    length_section,
    overlong_section,
    set_aside_section,
    shard_section,
    source_section,
)
from offline_packing.report.tables import table


def render_page(document: Document) -> bytes:
    """The whole page; sections that need a stage which is not complete are left out."""
    sources = ", ".join(dict.fromkeys(source["name"] for source in document["sources"]))
    sections = [
        *_head(document, sources),
        *saving_section(document),
        *length_section(document),
        *pack_section(document),
        *spread_section(document),
        *source_section(document),
        *set_aside_section(document),
        *overlong_section(document),
        *shard_section(document),
        *drawn_section(document),
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
