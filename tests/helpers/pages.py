"""Pages of the documentation and of reports, taken apart."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line at which it stands."""

    language: str
    text: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    """All fenced blocks of a page."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(match[1], match[2], text[: match.start()].count("\n") + 2)


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


#: A text that must not become markup.
HOSTILE = "<script>alert('x')</script>\"><img src=http://evil.example/x onerror=alert(1)>"


class Elements(HTMLParser):
    """Names and attributes of all elements, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data
