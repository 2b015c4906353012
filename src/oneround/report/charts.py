"""Charts as inline SVG: lines with bands, and bars. Lines differ by colour, dash and marker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oneround.report.figure import WIDTH, cut, figure
from oneround.report.markup import Html, number, table, tag, together
from oneround.report.scales import Scale, scale_for, tick_label

HEIGHT = 280
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 44
COLOURS, DASHES = 7, ("", "7 3", "2 3", "9 3 2 3")
DRAWN = 16  # markers on a line, about

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line: a value, or none, at each x; `low` and `high` are a band around it."""

    name: str
    values: Mapping[int, float | None]
    low: Mapping[int, float] | None = None
    high: Mapping[int, float] | None = None
    faint: bool = False
    """Only its band is drawn, no line."""

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
    format_value: Callable[[object], str] = number,
) -> Html:
    """Lines over epochs. `level` draws a horizontal line of reference; `format_value` formats a value of the legend and table."""
    xs = sorted({x for each in series for x in (each.low or {}).keys() | each.values.keys()})
    ys = [y for each in series for y in _heights(each)]
    across = scale_for([], LEFT, WIDTH - RIGHT, bounds=_wide(xs))
    up = scale_for(ys, HEIGHT - BOTTOM, TOP, log=log, bounds=bounds)
    parts = [_grid(across, up, x_label, y_label + (" (log axis)" if log else ""))]
    if level is not None:
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=up(level), y2=up(level), class_="level"))
    parts += [_band(each, across, up, style) for style, each in enumerate(series) if each.low is not None]
    parts += [_line(each, across, up, style) for style, each in enumerate(series) if not each.faint]
    description = f"Line chart of {y_label}{' on a logarithmic axis' if log else ''} against {x_label}. "
    description += " ".join(_in_words(each, up, format_value) for each in series[:12])
    rows = [[str(x), *(cell for each in series for cell in _cells(each, x, format_value))] for x in xs]
    heads = [x_label, *(head for each in series for head in _heads(each))]
    lost = _lost(series, up)
    legend = tag("ul", *(_key(each, style, up, format_value) for style, each in enumerate(series)), class_="legend")
    return figure(title, description, together(parts), HEIGHT, together([legend, lost]), table(heads, rows, title))


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
    )


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


def _key(series: Series, style: int, up: Scale, format_value: Callable[[object], str]) -> Html:
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
    last = tag("b", format_value(points[-1][1])) if points and not series.faint else Html("")
    return tag("li", swatch, tag("span", series.name), last)


def _in_words(series: Series, up: Scale, format_value: Callable[[object], str]) -> str:
    points = series.points(up)
    if not points:
        return f"{series.name}: nothing to draw."
    (first, start), (last, end) = points[0], points[-1]
    if first == last:
        return f"{series.name}: {format_value(start)} at {first}."
    values = [y for _, y in points]
    return (
        f"{series.name}: {format_value(start)} at {first}, {format_value(end)} at {last}, between {format_value(min(values))} and "
        f"{format_value(max(values))}."
    )


def _heads(series: Series) -> list[str]:
    if series.faint:
        return [f"{series.name}: lowest", f"{series.name}: highest"]
    return [series.name, *(["95 % low", "95 % high"] if series.low is not None else [])]


def _cells(series: Series, x: int, format_value: Callable[[object], str]) -> list[str]:
    band = [] if series.low is None else [format_value(series.low.get(x)), format_value((series.high or {}).get(x))]
    return band if series.faint else [format_value(series.values.get(x)), *band]


def _lost(series: Sequence[Series], up: Scale) -> Html:
    """A remark on values that the chart cannot draw."""
    gone = [y for each in series for y in each.values.values() if y is not None and not up.takes(y)]
    none = sum(math.isfinite(y) for y in gone)
    texts = []
    if none:
        texts.append(f"{none} value{'s' * (none > 1)} of 0 or less: not on a log axis.")
    if len(gone) > none:
        texts.append(f"{len(gone) - none} value{'s' * (len(gone) - none > 1)} not finite: not drawn.")
    return tag("p", " ".join(texts), class_="aside") if texts else Html("")


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
    left = 12 + min(max(len(cut(bar.name, 24)) for bar in bars), 24) * 7.2
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
    description = f"Bar chart of {label}. " + " ".join(f"{bar.name}: {_end(bar)}." for bar in bars)
    spread = any(bar.dots for bar in bars)
    heads = ["", label, *(["each partition"] if spread else [])]
    rows = [[bar.name, _end(bar), *([" ".join(map(number, bar.dots))] if spread else [])] for bar in bars]
    return figure(title, description, together(parts), height, Html(""), table(heads, rows, title, text_columns=(2,)))


def _reach(bar: Bar) -> list[float]:
    """All that is drawn of a bar."""
    return [bar.value - (bar.margin or 0), bar.value + (bar.margin or 0), *bar.dots]


def _end(bar: Bar) -> str:
    return bar.text or number(bar.value) + (f" ± {number(bar.margin)}" if bar.margin is not None else "")


def _bar(bar: Bar, across: Scale, y: float) -> Html:
    def clamped(value: float) -> float:
        return across(min(max(value, across.low), across.high))

    start, length, middle = min(clamped(0), clamped(bar.value)), abs(clamped(bar.value) - clamped(0)), y + 8
    parts = [
        tag("text", cut(bar.name, 24), x=across.start - 6, y=middle + 4, class_="end"),
        tag("rect", x=start, y=y, width=max(length, 0.5), height=16, class_=f"bar c{bar.style % COLOURS}"),
    ]
    parts += [tag("circle", cx=clamped(dot), cy=middle, r=2.5, class_="dot") for dot in bar.dots]
    if bar.margin is not None:
        low, high = clamped(bar.value - bar.margin), clamped(bar.value + bar.margin)
        whisker = f"M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"
        parts.append(tag("path", d=whisker, class_="whisker"))
    farthest = max(clamped(0), *map(clamped, _reach(bar)))
    parts.append(tag("text", _end(bar), x=farthest + 6, y=middle + 4, class_="start strong"))
    return together(parts)
