"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from oneround.analysis.statistics import Summary, paired


def format_difference(difference: Summary) -> str:
    """`+1.5 ± 0.8`; ` (n.d.)` marks one that is not distinguishable from 0."""
    vague = difference.margin is not None and not difference.distinguishable
    return f"{difference:+.1f}{' (n.d.)' if vague else ''}"


def accuracy_table(accuracies: Mapping[str, Sequence[float]], title: str, baseline: str) -> Table:
    """Accuracies in percent over partitions, with their paired differences to the baseline where it is among them."""
    base, partitions = accuracies.get(baseline), len(next(iter(accuracies.values())))
    caption = (
        f"minus {baseline}: difference on the same partition, mean ± 95 % interval; "
        f"n.d.: not distinguishable with {partitions} partitions"
    )
    table = Table(title=title, caption=caption, title_justify="left", title_style="bold", caption_justify="left")
    table.add_column("rule", overflow="fold")
    for head in ("mean", "range", f"minus {baseline}"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, values in accuracies.items():
        summary = Summary(tuple(values))
        difference = "" if base is None or name == baseline else format_difference(paired(values, base))
        table.add_row(escape(name), f"{summary.mean:.1f}", f"{min(values):.1f} – {max(values):.1f}", difference)
    return table


def score_table(rules: Mapping[str, float], clients: Mapping[str, float]) -> Table:
    """Test accuracies of one run: every rule, then the clients alone."""
    table = Table(title="test accuracy", title_justify="left", title_style="bold")
    table.add_column("rule or client", overflow="fold")
    table.add_column("%", justify="right", no_wrap=True, min_width=7)
    for name, value in rules.items():
        table.add_row(escape(name), f"{100 * value:.2f}")
    table.add_section()
    shown = sorted(clients.items(), key=lambda item: -item[1])
    for name, value in shown[:10]:
        table.add_row(f"{escape(name)} alone", f"{100 * value:.2f}")
    if len(shown) > 10:
        table.add_row(f"{len(shown) - 10} more clients", f"≤ {100 * shown[10][1]:.2f}")
    return table
