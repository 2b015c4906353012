"""Charts hold hard values, and their colours can be read."""

from __future__ import annotations

import re
from pathlib import Path

from oneround.report.charts import Bar, Series, bar_chart, line_chart
from reports import Page


def test_charts_hold_hard_values() -> None:
    odd = {1: float("inf"), 2: 1e-9, 3: 1e12, 4: 0.0, 5: float("nan"), 6: None}
    text = line_chart("odd", [Series("a", odd), Series("none", {})], "epoch", "λ", log=True)
    assert "1 value of 0 or less" in text
    assert "2 values not finite" in text
    assert "nan" not in "".join(re.findall(r' (?:d|x|y|points)="[^"]*"', text))
    for drawn in (
        line_chart("flat", [Series("a", {1: 0.0, 2: 0.0})], "epoch", "loss"),
        line_chart("one", [Series("a", {4: 3.0})], "epoch", "loss"),
        line_chart("nothing", [], "epoch", "loss"),
        bar_chart("both ways", [Bar("a", -3.0, margin=1.0, dots=(-4.0, 2.0)), Bar("b", 0.0)], "points"),
    ):
        assert Page(drawn).count("svg")


def test_colours_can_be_read_in_light_and_dark() -> None:
    style = (Path(__file__).parents[2] / "src/oneround/report/style.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part)) for part in style.split("@media screen")[:2])
    for scheme in (light, dark):
        for name, least in (("ink", 7), ("soft", 4.5), ("link", 4.5), *((f"c{at}", 3) for at in range(7))):
            for paper in ("paper", "panel"):
                assert contrast(scheme[name], scheme[paper]) >= least, (name, scheme[name])
        assert contrast(scheme["on"], scheme["heat"]) >= 4.5


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of luminances."""

    def luminance(colour: str) -> float:
        shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)
