"""The frame of every chart: a `<figure>` with a caption, a picture with its text alternative, a legend where one is needed and the
data as a table. Colours are CSS variables, so the same picture works in light and dark.
"""

from __future__ import annotations

from oneround.report.markup import Html, folded, scrolling, tag

WIDTH = 480


def figure(
    title: str, description: str, drawing: Html, height: float, below: Html, data: Html, *, width: float = WIDTH
) -> Html:
    picture = tag(
        "svg", tag("title", title), tag("desc", description), drawing,
        viewBox=f"0 0 {width:.0f} {height:.0f}", role="img",
    )  # fmt: skip
    wide = width > WIDTH
    content = scrolling(picture, title) if wide else picture
    return tag(
        "figure", tag("figcaption", title), content, below, folded("Data as a table", data, class_="data"),
        class_="wide" if wide else None,
    )  # fmt: skip


def cut(name: str, most: int = 16) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
