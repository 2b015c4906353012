"""The command diagnose."""

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

from oneround.cli.options import app, out, print_line
from oneround.formatting import plural

if TYPE_CHECKING:
    from oneround.analysis.diagnosis import Finding
    from oneround.analysis.diagnosis.diagnose import Diagnosis

COLOURS = {"problem": "bold red", "warning": "yellow", "note": "cyan"}


@app.command()
def diagnose(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; finished, stopped or still training.")],
    deep: Annotated[bool, typer.Option("--deep", help="Also measure the features of every upload's encoder on the test images: effective rank, NC1, NC2.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:  # fmt: skip
    """Say what went wrong in a run: client, epoch, value, the threshold it crossed, and what to do."""
    from oneround.analysis.diagnosis.diagnose import diagnose as run_diagnosis

    diagnosis = run_diagnosis(folder, deep=deep)
    if as_json:
        typer.echo(json.dumps({"run": str(folder), **diagnosis.plain()}, ensure_ascii=False, indent=1))
        return
    print_line(_summary(folder, diagnosis))
    for line in _lines(diagnosis.findings):
        out.print(line, highlight=False, soft_wrap=True)
    if diagnosis.geometry:
        out.print(_geometry(diagnosis))
        print_line(
            "NC1: scatter within classes over that between them, 0: a point per class; NC2: 0 when class means are a simplex"
        )
    if not diagnosis.findings:
        print_line(f"looked for {', '.join(diagnosis.applied)}: found nothing")
    if diagnosis.skipped:
        print_line("nothing to look at for " + ", ".join(f"{rule} ({why})" for rule, why in diagnosis.skipped.items()))
    for remark in diagnosis.remarks:
        print_line(f"note: {remark}")


def _summary(folder: Path, diagnosis: Diagnosis) -> str:
    run = diagnosis.run
    last = [max(by_epoch) for by_epoch in run.measurements.epochs.values()] or [0]
    epochs = f"{min(last)}" if min(last) == max(last) else f"{min(last)} to {max(last)}"
    number = plural(len(diagnosis.findings), "finding") if diagnosis.findings else "no findings"
    planned = run.recipe.epochs + run.recipe.stacked  # a second exchange is one pass
    return f"{folder}: {run.recipe.method}, {len(run.trained)} clients, {epochs} of {planned} epochs; {number}"


def _lines(findings: Iterable[Finding]) -> Iterable[str]:
    """Findings under their rule; advice that is the same for several is printed once."""
    for (severity, rule, advice), group in groupby(
        findings, key=lambda finding: (finding.severity, finding.rule, finding.advice)
    ):
        yield f"[{COLOURS[severity]}]{severity}[/] [bold]{rule}[/]"
        for finding in group:
            yield f"  {escape(f'{finding.where}: ' if finding.where else '')}{escape(finding.evidence)}"
        yield f"  → {escape(advice)}"


def _geometry(diagnosis: Diagnosis) -> Table:
    """The geometry of every encoder's features on the test images of its client's classes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("client", "classes", "effective rank", "NC1", "NC2"):
        table.add_column(head, justify="left" if head == "client" else "right")
    for client, geometry in diagnosis.geometry.items():
        rank, nc1, nc2 = f"{geometry.effective_rank:.2f}", f"{geometry.nc1:.3g}", f"{geometry.nc2:.2g}"
        table.add_row(client, str(geometry.classes), rank, nc1, nc2)
    return table
