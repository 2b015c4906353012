"""Charts as inline SVG: lines with bands, heat maps, bars.

Each is a `<figure>` with a caption, a picture with its text alternative, a legend where one is needed and the data as a table.
Colours are CSS variables, so the same picture works in light and dark; lines also differ by dash and marker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oneround.report.markup import Html, folded, number, scrolling, table, tag, together
from oneround.report.scales import Scale, scale_for, tick_label

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 44
COLOURS, DASHES = 7, ("", "7 3", "2 3", "9 3 2 3")
LEVELS = 20  # shades of a heat map
DRAWN = 16  # markers on a line, about
FINE = 1600  # cells of a heat map of which every one that is not 0 is painted

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line: a value, or none, at each x; `low` and `high` are a band around it."""

    name: str
    values: Mapping[int, float | None]
    low: Mapping[int, float] | None = None
    high: Mapping[int, float] | None = None
    faint: bool = False
    """Drawn as a band alone."""

    def points(self, scale: Scale) -> list[tuple[int, float]]:
        return [(x, y) for x, y in sorted(self.values.items()) if y is not None and scale.takes(y)]


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    bounds: tuple[float, float] | None = None,
    level: float | None = None,
    shown: Callable[[object], str] = number,
) -> Html:
    """Lines over epochs. `level` draws a horizontal line of reference; `shown` words a value in the legend and table."""
    xs = sorted({x for each in series for x in (each.low or {}).keys() | each.values.keys()})
    ys = [y for each in series for y in _heights(each)]
    across = scale_for([], LEFT, WIDTH - RIGHT, bounds=_wide(xs))
    up = scale_for(ys, HEIGHT - BOTTOM, TOP, log=log, bounds=bounds)
    parts = [_grid(across, up, x_label, y_label + (" (log axis)" if log else ""))]
    if level is not None:
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=up(level), y2=up(level), class_="level"))
    parts += [_band(each, across, up, style) for style, each in enumerate(series) if each.low is not None]
    parts += [_line(each, across, up, style) for style, each in enumerate(series) if not each.faint]
    told = f"Line chart of {y_label}{' on a logarithmic axis' if log else ''} against {x_label}. "
    told += " ".join(_in_words(each, up, shown) for each in series[:12])
    rows = [[str(x), *(cell for each in series for cell in _cells(each, x, shown))] for x in xs]
    heads = [x_label, *(head for each in series for head in _heads(each))]
    lost = _lost(series, up)
    legend = tag("ul", *(_key(each, style, up, shown) for style, each in enumerate(series)), class_="legend")
    return _figure(title, told, together(parts), HEIGHT, together([legend, lost]), table(heads, rows, title))


def _wide(xs: Sequence[int]) -> tuple[float, float]:
    """From the first epoch to the last; of a single one, from 0."""
    if not xs or xs[-1] <= 0:
        return 0, 1
    return (xs[0], xs[-1]) if len(xs) > 1 else (0, xs[0])


def _heights(series: Series) -> list[float]:
    values = [y for y in series.values.values() if y is not None]
    return [*values, *(series.low or {}).values(), *(series.high or {}).values()]


def _grid(across: Scale, up: Scale, x_label: str, y_label: str) -> Html:
    """Axes, their round numbers and what they mean."""
    parts = []
    for tick in up.ticks:
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=up(tick), y2=up(tick), class_="grid"))
        parts.append(tag("text", tick_label(tick), x=LEFT - 6, y=up(tick) + 4, class_="end"))
    for tick in across.ticks:
        if tick == int(tick):
            parts.append(tag("text", tick_label(tick), x=across(tick), y=HEIGHT - BOTTOM + 17, class_="middle"))
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="axis"))
    parts.append(tag("text", x_label, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 7, class_="middle label"))
    centre = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(tag("text", y_label, transform=f"translate(13 {centre:.0f}) rotate(-90)", class_="middle label"))
    return together(parts)


def _band(series: Series, across: Scale, up: Scale, style: int) -> Html:
    assert series.low is not None and series.high is not None
    xs = [x for x in sorted(series.low) if up.takes(series.low[x]) and up.takes(series.high[x])]
    edge = [(across(x), up(series.high[x])) for x in xs] + [(across(x), up(series.low[x])) for x in reversed(xs)]
    return tag("path", d=_path(edge) + "z", class_=f"band c{style % COLOURS}") if len(xs) > 1 else Html("")


def _line(series: Series, across: Scale, up: Scale, style: int) -> Html:
    pieces, piece = [], list[Point]()
    for x, y in sorted(series.values.items()):
        if y is not None and up.takes(y):
            piece.append((across(x), up(y)))
        elif y is not None:  # not finite, or below a log axis: a gap
            pieces.append(piece)
            piece = []
    pieces.append(piece)
    drawn = "".join(_path(each) for each in pieces if each)
    points = [point for each in pieces for point in each]
    marked = [
        point for at, point in enumerate(points) if at % math.ceil(len(points) / DRAWN) == 0 or at == len(points) - 1
    ]
    dash = DASHES[style % len(DASHES)] or None
    colour = f"c{style % COLOURS}"
    return together(
        [
            tag("path", d=drawn, class_=f"line {colour}", stroke_dasharray=dash),
            tag("path", d="".join(_marker(style, *point) for point in marked), class_=f"mark {colour}"),
        ]
    )  # fmt: skip


def _path(points: Iterable[Point]) -> str:
    return "".join(f"{'L' if at else 'M'}{x:.1f} {y:.1f}" for at, (x, y) in enumerate(points))


def _marker(style: int, x: float, y: float) -> str:
    """Circle, square, triangle, diamond, triangle upside down, or a flat bar, about a place."""
    shapes = (
        f"M{x - 3:.1f} {y:.1f}a3 3 0 1 0 6 0a3 3 0 1 0-6 0",
        f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z",
        f"M{x:.1f} {y - 4:.1f}l4 7h-8z",
        f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4-4z",
        f"M{x:.1f} {y + 4:.1f}l4-7h-8z",
        f"M{x - 4:.1f} {y - 1.5:.1f}h8v3h-8z",
    )
    return shapes[style % len(shapes)]


def _key(series: Series, style: int, up: Scale, shown: Callable[[object], str]) -> Html:
    """A line of the legend: the stroke, the name, and where it ends."""
    colour, points = f"c{style % COLOURS}", series.points(up)
    if series.faint:
        stroke = tag("rect", x=0, y=2, width=30, height=10, class_=f"band {colour}")
    else:
        dash = DASHES[style % len(DASHES)] or None
        stroke = together(
            [
                tag("path", d="M0 7H30", class_=f"line {colour}", stroke_dasharray=dash),
                tag("path", d=_marker(style, 15, 7), class_=f"mark {colour}"),
            ]
        )
    swatch = tag("svg", stroke, viewBox="0 0 30 14", width="30", height="14", aria_hidden="true")
    last = tag("b", shown(points[-1][1])) if points and not series.faint else Html("")
    return tag("li", swatch, tag("span", series.name), last)


def _in_words(series: Series, up: Scale, shown: Callable[[object], str]) -> str:
    points = series.points(up)
    if not points:
        return f"{series.name}: nothing to draw."
    (first, start), (last, end) = points[0], points[-1]
    if first == last:
        return f"{series.name}: {shown(start)} at {first}."
    values = [y for _, y in points]
    return (
        f"{series.name}: {shown(start)} at {first}, {shown(end)} at {last}, between {shown(min(values))} and "
        f"{shown(max(values))}."
    )


def _heads(series: Series) -> list[str]:
    if series.faint:
        return [f"{series.name}: lowest", f"{series.name}: highest"]
    return [series.name, *(["95 % low", "95 % high"] if series.low is not None else [])]


def _cells(series: Series, x: int, shown: Callable[[object], str]) -> list[str]:
    band = [] if series.low is None else [shown(series.low.get(x)), shown((series.high or {}).get(x))]
    return band if series.faint else [shown(series.values.get(x)), *band]


def _lost(series: Sequence[Series], up: Scale) -> Html:
    """Says what a chart could not draw."""
    gone = [y for each in series for y in each.values.values() if y is not None and not up.takes(y)]
    none = sum(math.isfinite(y) for y in gone)
    told = []
    if none:
        told.append(f"{none} value{'s' * (none > 1)} of 0 or less: no place on a log axis.")
    if len(gone) > none:
        told.append(f"{len(gone) - none} value{'s' * (len(gone) - none > 1)} not finite: not drawn.")
    return tag("p", " ".join(told), class_="aside") if told else Html("")


def _figure(
    title: str, told: str, drawing: Html, height: float, below: Html, data: Html, *, width: float = WIDTH
) -> Html:
    picture = tag(
        "svg", tag("title", title), tag("desc", told), drawing,
        viewBox=f"0 0 {width:.0f} {height:.0f}", role="img",
    )  # fmt: skip
    wide = width > WIDTH
    shown = scrolling(picture, title) if wide else picture
    return tag(
        "figure", tag("figcaption", title), shown, below, folded("Data as a table", data, class_="data"),
        class_="wide" if wide else None,
    )  # fmt: skip


# --- heat maps -------------------------------------------------------------------------------------------------------


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    axes: tuple[str, str],
    told: str,
    *,
    most: float | None = None,
    shown: Callable[[float | None], str] = number,
    by_row: bool = False,
    data: Html | None = None,
) -> Html:
    """Values as shades with the numbers in them; `axes` name rows and columns, `by_row` shades each row against its sum."""
    left = 28 + min(max(len(_cut(name)) for name in rows), 16) * 7.4
    broad = len(columns) > 12
    width = max(WIDTH, min(left + 34 * len(columns), 1000)) if broad else WIDTH
    side = (width - left - 4) / len(columns)
    tall = side if len(rows) > 12 else min(max(side, 22), 34)
    slanted = max(len(name) for name in columns) * 7.2 > side and len(columns) <= 60
    top = 12 + (min(max(len(_cut(name, 12)) for name in columns), 12) * 5.2 if slanted else 8)
    height = top + tall * len(rows) + 26
    shades = _shades(values, most, by_row)
    cells = _paint(shades, left, top, side, tall)
    written = side >= 22 and tall >= 16
    if written:
        cells = together([cells, *_write(values, shades, shown, left, top, side, tall)])
    names = _names(rows, columns, left, top, side, tall, slanted)
    named = [
        tag("text", axes[1], x=(left + width) / 2, y=height - 8, class_="middle label"),
        tag("text", axes[0], transform=f"translate(12 {top + tall * len(rows) / 2:.0f}) rotate(-90)", class_="middle label"),
    ]  # fmt: skip
    if data is None:
        lines = [[name, *(shown(value) for value in row)] for name, row in zip(rows, values, strict=True)]
        data = table([f"{axes[0]} \\ {axes[1]}", *columns], lines, title)
    return _figure(title, told, together([cells, names, *named]), height, Html(""), data, width=width)


def _cut(name: str, most: int = 16) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _shades(values: Sequence[Sequence[float | None]], most: float | None, by_row: bool) -> list[list[int]]:
    """How dark every cell is, from 0 to `LEVELS`."""
    largest = most or max((value or 0 for row in values for value in row), default=0) or 1
    rounded = (
        math.ceil if len(values) * max(map(len, values), default=0) <= FINE else round
    )  # then a trace of colour is dropped
    found = []
    for row in values:
        full = (sum(value or 0 for value in row) or 1) if by_row else largest
        found.append([rounded(LEVELS * min((value or 0) / full, 1)) for value in row])
    return found


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
    shown: Callable[[float | None], str],
    left: float,
    top: float,
    side: float,
    tall: float,
) -> list[Html]:
    """The numbers, light on dark shades."""
    texts = []
    for at, row in enumerate(values):
        for column, value in enumerate(row):
            text = shown(value) if value else "·"
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
        tag("text", _cut(name), x=left - 6, y=top + (at + 0.5) * tall + 4, class_="end")
        for at, name in enumerate(rows)
        if at % each == 0
    ]
    each = max(1, math.ceil((12 if slanted else 9 * max(map(len, columns))) / side))
    for at, name in enumerate(columns):
        if at % each == 0:
            x = left + (at + 0.5) * side
            turn = f"translate({x + 3:.0f} {top - 5:.0f}) rotate(-40)" if slanted else None
            parts.append(
                tag("text", _cut(name, 12), transform=turn, class_="start")
                if slanted
                else tag("text", _cut(name, 12), x=x, y=top - 6, class_="middle")
            )
    return together(parts)


# --- bars ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A horizontal bar; `margin` is the half-width of an interval, `dots` the single values behind a mean."""

    name: str
    value: float
    style: int = 0
    margin: float | None = None
    dots: tuple[float, ...] = ()
    text: str = ""
    """What is written at its end; otherwise the number."""


def bar_chart(title: str, bars: Sequence[Bar], label: str, *, most: float | None = None) -> Html:
    """Values beside each other, to the right and left of 0."""
    left = 12 + min(max(len(_cut(bar.name, 24)) for bar in bars), 24) * 7.2
    right = WIDTH - 12 - max(len(_end(bar)) for bar in bars) * 7.6
    reach = [bound for bar in bars for bound in (0.0, *_reach(bar))]
    low, high = min(reach), most or max(reach)
    across = scale_for([], left, right, bounds=(low, high if high > low else low + 1))
    tall, height = 24, 24 * len(bars) + 42
    parts = []
    for tick in across.ticks:
        style = "axis" if tick == 0 else "grid"
        parts.append(tag("line", x1=across(tick), x2=across(tick), y1=4, y2=height - 38, class_=style))
        parts.append(tag("text", tick_label(tick), x=across(tick), y=height - 24, class_="middle"))
    for at, bar in enumerate(bars):
        parts.append(_bar(bar, across, 6 + at * tall))
    parts.append(tag("text", label, x=(left + right) / 2, y=height - 6, class_="middle label"))
    told = f"Bar chart of {label}. " + " ".join(f"{bar.name}: {_end(bar)}." for bar in bars)
    spread = any(bar.dots for bar in bars)
    heads = ["", label, *(["each partition"] if spread else [])]
    rows = [[bar.name, _end(bar), *([" ".join(map(number, bar.dots))] if spread else [])] for bar in bars]
    return _figure(title, told, together(parts), height, Html(""), table(heads, rows, title, words=(2,)))


def _reach(bar: Bar) -> list[float]:
    """All that is drawn of a bar."""
    return [bar.value - (bar.margin or 0), bar.value + (bar.margin or 0), *bar.dots]


def _end(bar: Bar) -> str:
    return bar.text or number(bar.value) + (f" ± {number(bar.margin)}" if bar.margin is not None else "")


def _bar(bar: Bar, across: Scale, y: float) -> Html:
    def place(value: float) -> float:
        return across(min(max(value, across.low), across.high))

    start, length, middle = min(place(0), place(bar.value)), abs(place(bar.value) - place(0)), y + 8
    parts = [
        tag("text", _cut(bar.name, 24), x=across.start - 6, y=middle + 4, class_="end"),
        tag("rect", x=start, y=y, width=max(length, 0.5), height=16, class_=f"bar c{bar.style % COLOURS}"),
    ]
    parts += [tag("circle", cx=place(dot), cy=middle, r=2.5, class_="dot") for dot in bar.dots]
    if bar.margin is not None:
        low, high = place(bar.value - bar.margin), place(bar.value + bar.margin)
        whisker = f"M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"
        parts.append(tag("path", d=whisker, class_="whisker"))
    farthest = max(place(0), *map(place, _reach(bar)))
    parts.append(tag("text", _end(bar), x=farthest + 6, y=middle + 4, class_="start strong"))
    return together(parts)
