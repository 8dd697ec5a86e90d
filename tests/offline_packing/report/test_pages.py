"""Pages: what comes from a dataset is text, whatever it holds; figures on axes."""

import pytest

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


@pytest.mark.parametrize(
    ("highest", "marks"), [(1, [1]), (3, [2]), (7, [5]), (10, [5, 10]), (250, [100, 200])]
)
def test_gridlines_stand_at_round_numbers(highest: int, marks: list[int]) -> None:
    assert list(pages._round_numbers(highest)) == marks


def test_powers_of_two_are_named_below_an_axis() -> None:
    assert pages._labelled_edges([6, 7, 8, 10, 12, 14, 16]) == [2, 6]
    assert pages._labelled_edges([5, 6, 7]) == [0, 2]
    assert len(pages._labelled_edges([2**i for i in range(20)])) <= 9


def test_sizes_in_bytes() -> None:
    assert [pages._bytes(n) for n in (999, 1_234_567, 123_456)] == ["999 B", "1.2 MB", "123 kB"]
