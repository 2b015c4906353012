"""Markup escapes whatever is not markup, and numbers are written one way."""

from __future__ import annotations

import pytest

from oneround.report import markup
from oneround.report.markup import Html, tag, together
from reports import HOSTILE, Page


def test_text_is_escaped_and_markup_is_not() -> None:
    drawn = tag("p", HOSTILE, tag("b", "bold"), title=f'"{HOSTILE}"')
    assert "<script" not in drawn and drawn.endswith("<b>bold</b></p>")
    page = Page(drawn)
    assert page.texts == [HOSTILE, "bold"] and page.tags[0] == ("p", {"title": f'"{HOSTILE}"'})
    assert together(["a < b", Html("<i></i>")]) == "a &lt; b<i></i>"


def test_attributes() -> None:
    assert tag("line", x1=1.04, y1=2.0, class_="axis", aria_label="y", id=None) == (
        '<line x1="1" y1="2" class="axis" aria-label="y"></line>'
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (True, "True"), (12345, "12,345"), (0.123456, "0.1235"), (1e-9, "1e-09"), ("words", "words")],
)
def test_numbers(value: object, text: str) -> None:
    assert markup.number(value) == text


def test_shares_in_percent() -> None:
    assert (markup.percent(0.93241), markup.percent(None)) == ("93.24", "–")
    assert (markup.score(93.241), markup.score(None)) == ("93.24", "–")


def test_a_table_names_its_rows_and_scrolls_by_keyboard() -> None:
    page = Page(markup.table(["a", "b"], [["1", HOSTILE]], "caption", text_columns=(1,)))
    assert page.tables == [[["a", "b"], ["1", HOSTILE]]]
    assert [attributes for name, attributes in page.tags if name == "td"] == [{"class": "words"}]
    assert page.tags[0][1] == {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": "caption"}


def test_nothing_to_say_is_no_markup() -> None:
    assert markup.notes([]) == markup.charts([]) == ""
    assert Page(markup.notes(["one", "two"])).count("li") == 2
