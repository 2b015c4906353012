"""Heat maps: a shade for every value, the number in it where there is room, and all values as a table."""

from __future__ import annotations

import re

from oneround.report.heat import heat_map
from reports import Page

OPACITY = re.compile(r'fill-opacity="([0-9.]+)"')


def shades(drawn: str) -> list[float]:
    return [float(value) for value in OPACITY.findall(drawn)]


def test_a_larger_value_is_darker() -> None:
    drawn = heat_map("t", ["r"], ["a", "b", "c"], [[1, 2, 4]], ("row", "column"), "words")
    assert shades(drawn) == sorted(shades(drawn)) and len(shades(drawn)) == 3
    assert shades(drawn)[-1] == 1.0, "the largest value has the full colour"
    assert shades(heat_map("t", ["r"], ["a"], [[4]], ("row", "column"), "words", most=8))[0] < 1.0


def test_a_row_is_shaded_by_its_own_sum() -> None:
    by_row = heat_map("t", ["r", "s"], ["a", "b"], [[1, 1], [100, 100]], ("row", "column"), "words", by_row=True)
    assert len(shades(by_row)) == 1, "half of each row: one shade, one path"
    assert len(shades(heat_map("t", ["r", "s"], ["a", "b"], [[1, 1], [100, 100]], ("row", "column"), "words"))) == 2


def test_values_are_written_and_in_the_table() -> None:
    page = Page(heat_map("t", ["r"], ["a", "b"], [[7, None]], ("row", "column"), "words"))
    assert page.tables == [[["row \\ column", "a", "b"], ["r", "7", "–"]]]
    assert page.texts.count("7") == 2 and "·" in page.texts, "in the cell and in the table; nothing is a dot"


def test_many_cells_and_no_value_at_all() -> None:
    names = list(map(str, range(120)))
    many = heat_map("many", names, names, [[3] * 120] * 120, ("a", "b"), "words")
    assert len(shades(many)) == 1, "14,400 cells of one shade are one path"
    assert Page(heat_map("empty", ["a"], ["b"], [[None]], ("a", "b"), "words")).count("svg") == 1
