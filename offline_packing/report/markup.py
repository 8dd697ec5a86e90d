"""HTML and SVG as element trees: whatever a dataset holds, its text can only become text."""

import html
import re
from functools import cache
from importlib import resources
from string import Template
from typing import Final
from xml.etree import ElementTree

Element = ElementTree.Element
Content = Element | str | None

#: Not allowed in HTML: control characters but tab and newline; surrogates cannot be encoded.
_FORBIDDEN: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
#: Their text is not escaped when it is written.
_UNESCAPED: Final = ("script", "style")


def tag(name: str, *children: Content, **attributes: str | float) -> Element:
    """An element: `tag("td", "a < b", class_="number")`. None is left out; `_` in the name of an
    attribute stands for `-`, and is dropped at its end."""
    if name in _UNESCAPED:
        raise ValueError(f"element {name!r} would not be escaped; it belongs in page.html")
    element = Element(name)
    for attribute, value in attributes.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        element.set(attribute.rstrip("_").replace("_", "-"), printable(text))
    for child in children:
        if isinstance(child, str):
            _append_text(element, printable(child))
        elif child is not None:
            element.append(child)
    return element


def printable(text: str) -> str:
    """Text with U+FFFD for characters that no page may hold."""
    return _FORBIDDEN.sub("\ufffd", text)


def page(title: str, *body: Content) -> bytes:
    """A complete HTML page: nothing outside it is needed to show it."""
    main = tag("main", *body)
    content = ElementTree.tostring(main, encoding="unicode", method="html")
    return _skeleton().substitute(title=html.escape(printable(title)), main=content).encode()


@cache
def _skeleton() -> Template:
    return Template(resources.files(__package__).joinpath("page.html").read_text("utf-8"))


def _append_text(element: Element, text: str) -> None:
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text
