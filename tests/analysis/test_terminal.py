"""Tables on the terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from oneround.analysis.terminal import accuracy_table

ACCURACIES = {"average": [60.0, 70.0, 65.0], "better": [70.1, 80.0, 74.9], "maybe": [59.0, 75.0, 66.0]}


def lines_of(table: Table) -> dict[str, str]:
    """The lines of a printed table by their first word."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table)
    return {line.split()[1]: line for line in console.export_text().splitlines() if len(line.split()) > 2}


def test_a_table_says_when_a_difference_is_not_distinguishable() -> None:
    lines = lines_of(accuracy_table(ACCURACIES, "title", "average"))
    assert "65.0" in lines["average"] and "60.0 – 70.0" in lines["average"] and "+" not in lines["average"]
    assert "+10.0 ± 0.2 " in lines["better"] and "(n.d.)" not in lines["better"]
    assert "(n.d.)" in lines["maybe"]


def test_without_the_baseline_there_are_no_differences() -> None:
    lines = lines_of(accuracy_table(ACCURACIES, "title", "no such rule"))
    assert "±" not in lines["better"] and "75.0" in lines["better"]
