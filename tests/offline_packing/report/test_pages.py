"""Pages: what comes from a dataset is text, whatever it holds; figures on axes."""

from offline_packing.report import pages
from tests.helpers.elements import HOSTILE, Elements


def test_nothing_breaks_out_of_a_page() -> None:
    page = pages.render_packs([], f"</title>{HOSTILE}\x1b\ud800").decode()
    elements = Elements(page)
    assert elements.names.keys() <= {
        *("html", "head", "meta", "title", "style", "body", "main", "h1", "p", "span")
    }
    assert elements.text.count(HOSTILE) == 2  # the title and the heading
    assert "\x1b" not in page
    assert page.count("\ufffd") == 4
