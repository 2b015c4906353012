"""Heat maps as inline SVG: values as shades, with the numbers in them where there is room."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from oneround.report.figure import WIDTH, cut, figure
from oneround.report.markup import Html, number, table, tag, together

LEVELS = 20  # shades
FINE = 1600  # cells of which every one that is not 0 is painted


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    axes: tuple[str, str],
    description: str,
    *,
    most: float | None = None,
    format_value: Callable[[float | None], str] = number,
    by_row: bool = False,
    data: Html | None = None,
) -> Html:
    """Values as shades with the numbers in them; `axes` name rows and columns, `by_row` shades each row against its sum."""
    left = 28 + min(max(len(cut(name)) for name in rows), 16) * 7.4
    broad = len(columns) > 12
    width = max(WIDTH, min(left + 34 * len(columns), 1000)) if broad else WIDTH
    side = (width - left - 4) / len(columns)
    tall = side if len(rows) > 12 else min(max(side, 22), 34)
    slanted = max(len(name) for name in columns) * 7.2 > side and len(columns) <= 60
    top = 12 + (min(max(len(cut(name, 12)) for name in columns), 12) * 5.2 if slanted else 8)
    height = top + tall * len(rows) + 26
    shades = _shades(values, most, by_row)
    cells = _paint(shades, left, top, side, tall)
    written = side >= 22 and tall >= 16
    if written:
        cells = together([cells, *_write(values, shades, format_value, left, top, side, tall)])
    names = _names(rows, columns, left, top, side, tall, slanted)
    named = [
        tag("text", axes[1], x=(left + width) / 2, y=height - 8, class_="middle label"),
        tag("text", axes[0], transform=f"translate(12 {top + tall * len(rows) / 2:.0f}) rotate(-90)", class_="middle label"),
    ]  # fmt: skip
    if data is None:
        lines = [[name, *(format_value(value) for value in row)] for name, row in zip(rows, values, strict=True)]
        data = table([f"{axes[0]} \\ {axes[1]}", *columns], lines, title)
    return figure(title, description, together([cells, names, *named]), height, Html(""), data, width=width)


def _shades(values: Sequence[Sequence[float | None]], most: float | None, by_row: bool) -> list[list[int]]:
    """How dark every cell is, from 0 to `LEVELS`."""
    largest = most or max((value or 0 for row in values for value in row), default=0) or 1
    rounded = (
        math.ceil if len(values) * max(map(len, values), default=0) <= FINE else round
    )  # then a trace of colour is dropped
    levels = []
    for row in values:
        full = (sum(value or 0 for value in row) or 1) if by_row else largest
        levels.append([rounded(LEVELS * min((value or 0) / full, 1)) for value in row])
    return levels


def _paint(shades: Sequence[Sequence[int]], left: float, top: float, side: float, tall: float) -> Html:
    """One path a shade, however many cells."""
    paths: dict[int, list[str]] = {}
    gap = 1 if side >= 8 else 0
    shape = f"h{side - gap:.1f}v{tall - gap:.1f}h-{side - gap:.1f}z"
    for at, row in enumerate(shades):
        for column, shade in enumerate(row):
            if shade:
                paths.setdefault(shade, []).append(f"M{left + column * side:.1f} {top + at * tall:.1f}{shape}")
    count, columns = len(shades), max(map(len, shades), default=0)
    back = tag("rect", x=left, y=top, width=columns * side, height=count * tall, class_="blank")
    painted = [
        tag("path", d="".join(cells), class_="heat", fill_opacity=f"{0.08 + 0.92 * shade / LEVELS:.2f}")
        for shade, cells in sorted(paths.items())
    ]
    return together([back, *painted])


def _write(
    values: Sequence[Sequence[float | None]],
    shades: Sequence[Sequence[int]],
    format_value: Callable[[float | None], str],
    left: float,
    top: float,
    side: float,
    tall: float,
) -> list[Html]:
    """The numbers, light on dark shades."""
    texts = []
    for at, row in enumerate(values):
        for column, value in enumerate(row):
            text = format_value(value) if value else "·"
            small = " small" if len(text) * 7 > side else ""
            on = " on" if shades[at][column] > 0.5 * LEVELS else ""
            x, y = left + (column + 0.5) * side, top + (at + 0.5) * tall + 4
            texts.append(tag("text", text, x=x, y=y, class_=f"middle{small}{on}"))
    return texts


def _names(
    rows: Sequence[str], columns: Sequence[str], left: float, top: float, side: float, tall: float, slanted: bool
) -> Html:
    """Names of rows and columns; where there is no room, some of them."""
    each = max(1, math.ceil(12 / tall))
    parts = [
        tag("text", cut(name), x=left - 6, y=top + (at + 0.5) * tall + 4, class_="end")
        for at, name in enumerate(rows)
        if at % each == 0
    ]
    each = max(1, math.ceil((12 if slanted else 9 * max(map(len, columns))) / side))
    for at, name in enumerate(columns):
        if at % each == 0:
            x = left + (at + 0.5) * side
            turn = f"translate({x + 3:.0f} {top - 5:.0f}) rotate(-40)" if slanted else None
            parts.append(
                tag("text", cut(name, 12), transform=turn, class_="start")
                if slanted
                else tag("text", cut(name, 12), x=x, y=top - 6, class_="middle")
            )
    return together(parts)
