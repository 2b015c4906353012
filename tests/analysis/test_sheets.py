"""One table in every format."""

from __future__ import annotations

import json
import math

import pytest

from oneround.analysis.sheets import Sheet, render


def test_a_cell_cannot_break_a_table() -> None:
    sheet = Sheet("t", ["a", "b"], [["x|y", "1 & 2"]])
    assert r"x\|y" in sheet.markdown() and r"1 \& 2" in sheet.latex()
    plain = Sheet("t", ["λ first → last"], [["× 3, Δ {1} $2 a^b ~ \\"]]).latex()
    assert plain.isascii() and r"\{1\} \$2" in plain


def test_several_tables_in_one_file_are_told_apart() -> None:
    both = [Sheet(f"α = {alpha}, five", ["a"], [["1"]]) for alpha in (0.05, 0.5)]
    assert render(both, ".csv") == '"α = 0.05, five"\na\n1\n\n"α = 0.5, five"\na\n1\n'
    assert render(both[:1], ".csv") == "a\n1\n"


def test_json_has_no_infinity() -> None:
    """λ that explodes is infinite in the end."""
    sheet = Sheet("λ", ["epoch", "a"], [["1", "inf"]], data={"raw": {"a": {1: math.inf, 2: 3.0}}})
    (content,) = json.loads(render([sheet], ".json"), parse_constant=pytest.fail)
    assert content["rows"] == {"raw": {"a": {"1": None, "2": 3.0}}}
