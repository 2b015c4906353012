"""Tables for people: on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from oneround.observe.statistics import Summary


@dataclass(frozen=True)
class Row:
    """One line of a comparison: accuracies in percent over partitions, and their paired difference to a baseline."""

    name: str
    accuracy: Summary
    difference: Summary | None = None


def difference_in_words(difference: Summary | None) -> str:
    if difference is None:
        return ""
    if difference.margin is None:
        return f"{difference.mean:+.1f}"
    return f"{difference.mean:+.1f} ± {difference.margin:.1f}{'' if difference.distinguishable else ' (n.d.)'}"


def terminal_table(rows: Sequence[Row], title: str, baseline: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
    table.caption = (
        f"minus {baseline}: difference on the same partition, mean ± 95 % interval; n.d.: not distinguishable "
        f"with {len(rows[0].accuracy.values)} partitions"
    )
    table.add_column("rule", overflow="fold")
    for head in ("mean", "range", f"minus {baseline}"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        shown = f"{row.accuracy.low:.1f} – {row.accuracy.high:.1f}"
        table.add_row(row.name, f"{row.accuracy.mean:.1f}", shown, difference_in_words(row.difference))
    return table


def score_table(rules: Mapping[str, float], clients: Mapping[str, float]) -> Table:
    """One run: every rule, then the clients alone."""
    table = Table(title="test accuracy", title_justify="left", title_style="bold")
    table.add_column("rule or client", overflow="fold")
    table.add_column("%", justify="right", no_wrap=True, min_width=7)
    for name, value in rules.items():
        table.add_row(name, f"{100 * value:.2f}")
    table.add_section()
    shown = sorted(clients.items(), key=lambda item: -item[1])
    for name, value in shown[:10]:
        table.add_row(f"{name} alone", f"{100 * value:.2f}")
    if len(shown) > 10:
        table.add_row(f"{len(shown) - 10} more clients", f"≤ {100 * shown[10][1]:.2f}")
    return table
