"""Tables of a page."""

from collections.abc import Sequence
from functools import partial

from offline_packing.report.markup import Content, Element, tag


def table(
    names: Sequence[str], lines: Sequence[Sequence[Content]], *, numbers_from: int | None = 1
) -> Element:
    """A table; text cells from column `numbers_from` on stand to the right. A cell that is a `td`
    stands as it is."""

    def is_number(column: int, content: Content) -> bool:
        return numbers_from is not None and column >= numbers_from and isinstance(content, str)

    def cell(kind: str, content: Content, number: bool) -> Element:
        if isinstance(content, Element) and content.tag == "td":
            return content
        return tag(kind, content, **({"class_": "number"} if number else {}))

    numbers = [all(is_number(i, line[i]) for line in lines) for i in range(len(names))]
    head = tag("tr", *map(partial(cell, "th"), names, numbers))
    body = [tag("tr", *map(partial(cell, "td"), line, numbers)) for line in lines]
    table = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", table, class_="scroll")
