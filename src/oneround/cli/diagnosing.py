"""The command that says what went wrong in a run: diagnose."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from oneround.cli.options import app, out

if TYPE_CHECKING:
    from oneround.diagnose import Diagnosis
    from oneround.observe.diagnosis import Finding

COLOURS = {"problem": "bold red", "warning": "yellow", "note": "cyan"}


@app.command()
def diagnose(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; finished, stopped or still training.")],
    deep: Annotated[bool, typer.Option("--deep", help="Also let every upload's encoder see the test images: effective rank, NC1, NC2.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:  # fmt: skip
    """Say what went wrong in a run: client, epoch, value, the threshold it crossed, and what to do."""
    from oneround.diagnose import diagnose as look

    told = look(folder, deep=deep)
    if as_json:
        typer.echo(json.dumps({"run": str(folder), **told.plain()}, ensure_ascii=False, indent=1))
        return
    _say(_summary(folder, told))
    for line in _lines(told.findings):
        out.print(line, highlight=False, soft_wrap=True)
    if told.geometry:
        out.print(_geometry(told))
        _say(
            "NC1: scatter within classes over that between them, 0: a point per class; NC2: 0 when class means are a simplex"
        )
    if not told.findings:
        _say(f"looked for {', '.join(told.looked)}: found nothing")
    if told.aside:
        _say("nothing to look at for " + ", ".join(f"{rule} ({why})" for rule, why in told.aside.items()))
    for remark in told.remarks:
        _say(f"note: {remark}")


def _say(text: str) -> None:
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def _summary(folder: Path, told: Diagnosis) -> str:
    done = [entries[-1]["epoch"] for entries in told.run.entries.values() if entries]
    far = f"{min(done)}" if len(set(done)) == 1 else f"{min(done)} to {max(done)}" if done else "0"
    number = len(told.findings)
    return (
        f"{folder}: {told.run.recipe.method}, {len(told.run.clients)} clients, {far} of {told.run.epochs} epochs; "
        f"{number or 'no'} finding{'s' * (number != 1)}"
    )


def _lines(findings: Iterable[Finding]) -> Iterable[str]:
    """Findings under their rule; advice that is the same for several is said once."""
    for (severity, rule, advice), group in groupby(
        findings, key=lambda finding: (finding.severity, finding.rule, finding.advice)
    ):
        yield f"[{COLOURS[severity]}]{severity}[/] [bold]{rule}[/]"
        for finding in group:
            yield f"  {escape(f'{finding.where}: ' if finding.where else '')}{escape(finding.evidence)}"
        yield f"  → {escape(advice)}"


def _geometry(told: Diagnosis) -> Table:
    """How every encoder lays out the test images of its client's classes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("client", "classes", "effective rank", "NC1", "NC2"):
        table.add_column(head, justify="left" if head == "client" else "right")
    for client, seen in told.geometry.items():
        table.add_row(client, str(seen.classes), f"{seen.effective_rank:.2f}", f"{seen.nc1:.3g}", f"{seen.nc2:.2g}")
    return table
