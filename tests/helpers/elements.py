"""A page as a browser reads it."""

from collections import Counter
from html.parser import HTMLParser

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
