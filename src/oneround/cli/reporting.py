"""The command report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oneround.cli.options import InterestOption, app, print_line


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS…", help="A run folder, finished or not; or folders with run folders in them (a sweep).")],
    target: Annotated[Path, typer.Option("--out", help="The file to write, or a folder for it.")] = Path("report.html"),
    baseline: Annotated[str | None, typer.Option("--baseline", help="Method the others are compared with; otherwise the first.")] = None,
    interest: InterestOption = 1.0,
) -> None:  # fmt: skip
    """Write one HTML file about a run or a sweep: charts, comparison, findings; it opens offline."""
    from oneround.files import write_durably
    from oneround.formatting import format_bytes
    from oneround.report import report as render

    file = target / "report.html" if target.is_dir() else target
    raw = render(runs, baseline, interest).encode()
    write_durably(file, raw)
    print_line(f"written to {file} ({format_bytes(len(raw))})")
