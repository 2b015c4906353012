"""HTML that cannot be broken from outside: what is not markup already is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


EMPTY = Html("")


def tag(name: str, *content: str, **attributes: str | float | None) -> Html:
    """An element. Content that is not `Html` is escaped; `class_` is class, `aria_label` aria-label, None leaves one out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = together(content)
    return Html(f"<{name}{written}>{inside}</{name}>")


def together(parts: Iterable[str]) -> Html:
    """Pieces one after another."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def _plain(value: str | float) -> str:
    """Coordinates need no more than a tenth."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def number(value: object) -> str:
    """A number as a table shows it; something missing is a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def percent(share: float | None) -> str:
    """`93.24`, of a share between 0 and 1."""
    return "–" if share is None else f"{100 * share:.2f}"


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str, *, text_columns: Sequence[int] = ()
) -> Html:
    """A table in a box of its own that scrolls when it is wide; `text_columns` are aligned as text."""

    def style(column: int) -> str | None:
        return "words" if column in text_columns else None

    def cell(column: int, text: str) -> Html:
        return tag("td", text, class_=style(column)) if column else tag("th", text, scope="row")

    top = tag("thead", tag("tr", *(tag("th", head, scope="col", class_=style(at)) for at, head in enumerate(heads))))
    body = tag("tbody", *(tag("tr", *(cell(at, text) for at, text in enumerate(row))) for row in rows))
    element = tag("table", tag("caption", caption), top, body)
    return scrolling(element, caption)


def scrolling(content: Html, label: str) -> Html:
    """A box that scrolls sideways by itself; the keyboard reaches it."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def folded(summary: str, *content: str, class_: str | None = None) -> Html:
    """A collapsed block under a summary."""
    return tag("details", tag("summary", summary), *content, class_=class_)


def facts(pairs: Iterable[tuple[str, str]], class_: str = "facts") -> Html:
    """Name and value, a line each."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_=class_)


def notes(texts: Iterable[str]) -> Html:
    items = [tag("li", text) for text in texts]
    return tag("ul", *items, class_="notes") if items else Html("")


def charts(drawn: Sequence[Html], *, small: bool = False) -> Html:
    return tag("div", *drawn, class_="charts small" if small else "charts") if drawn else Html("")


def score(value: object) -> str:
    """Accuracy in percent, as tables show it."""
    return f"{value:.2f}" if isinstance(value, float) else "–"


def remark(text: str) -> Html:
    return tag("p", text, class_="aside")
