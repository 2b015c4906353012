"""Every chart has a caption, words for who cannot see it and its data; a wide one scrolls by itself."""

from __future__ import annotations

from oneround.report.figure import WIDTH, cut, figure
from oneround.report.markup import EMPTY, Html, tag
from reports import Page


def drawn(width: float) -> Page:
    return Page(figure("Title", "Words", tag("path"), 10, EMPTY, Html("<table></table>"), width=width))


def test_a_figure_has_caption_words_and_data() -> None:
    page = drawn(WIDTH)
    assert page.texts == ["Title", "Title", "Words", "Data as a table"]
    assert (page.count("figcaption"), page.count("desc"), page.count("table")) == (1, 1, 1)


def test_only_a_wide_figure_scrolls() -> None:
    assert "class" not in {key for _, attributes in drawn(WIDTH).tags[:1] for key, value in attributes.items() if value}
    assert drawn(WIDTH + 1).tags[0][1]["class"] == "wide"
    assert drawn(WIDTH + 1).count("div") == 1 and drawn(WIDTH).count("div") == 0


def test_long_names_are_cut() -> None:
    assert (cut("a" * 16), cut("a" * 17), cut("abcdef", 3)) == ("a" * 16, "a" * 15 + "…", "ab…")
