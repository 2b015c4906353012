"""The command merge: parts that several machines measured become one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oneround.cli.options import app, print_line
from oneround.errors import RunError

SHOWN = 5  # names in a line


@app.command()
def merge(
    parts: Annotated[
        list[Path],
        typer.Argument(
            metavar="PART…",
            help="A sweep's folder from each machine; for a record also records made with compare --keep.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Option(
            "--out", help="A folder for the runs, or FILE.json for a record of them.", metavar="FOLDER | FILE.json"
        ),
    ],
) -> None:
    """Join the parts of a sweep that several machines measured; every run once, nothing is overwritten."""
    import oneround.catalog  # noqa: F401
    from oneround.studies.merge import merge_records, merge_runs

    merged = (merge_records if target.suffix == ".json" else merge_runs)(parts, target)
    before = merged.runs - len(merged.added)
    print_line(f"{merged.runs} run(s) in {target}: {len(merged.added)} added, {before} there already")
    if merged.unfinished:
        names = ", ".join([*merged.unfinished[:SHOWN], *["…"] * (len(merged.unfinished) > SHOWN)])
        print_line(f"{len(merged.unfinished)} not finished in any part: {names}", wrap=True)
    if merged.faults:
        raise RunError("\n".join(merged.faults))
    print_line(f"look at them with oneround compare {target}")
