"""The command reproduce: named studies, into one small record each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from oneround.cli.options import (
    DataDirOption,
    DataOption,
    DeviceOption,
    SetOption,
    app,
    data_overrides,
    out,
    print_line,
    print_wide,
)
from oneround.config.load import parse_override
from oneround.errors import RunError


@app.command()
def reproduce(
    study: Annotated[str | None, typer.Argument(metavar="STUDY", help="A named study, or the YAML file of one; without it they are listed.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the studies, or the cells of one.")] = False,
    data: DataOption = None,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
    minutes: Annotated[float | None, typer.Option("--minutes", min=0.01, help="Time budget: stop between two epochs; the same command goes on.")] = None,
    part: Annotated[str | None, typer.Option("--part", help="Only a part of the cells: 2/5 is every fifth from the second on; oneround merge joins the records.", metavar="K/N")] = None,
    variants: Annotated[list[str] | None, typer.Option("--variant", help="Only this variant; may be given several times.", metavar="NAME")] = None,
    settings: Annotated[list[str] | None, typer.Option("--setting", help="Only this setting; may be given several times.", metavar="NAME")] = None,
    partitions: Annotated[str | None, typer.Option("--partitions", help="Other partition seeds than the study's: 1-5, or 1,2,7")] = None,
    known: Annotated[list[Path] | None, typer.Option("--known", help="A record of another study; runs of it that are cells of this one are taken over.", metavar="FILE.json")] = None,
    table: Annotated[bool, typer.Option("--table", help="Run nothing: show the table of the record.")] = False,
    sets: SetOption = None,
    folder: Annotated[Path, typer.Option("--runs", help="Folder of the cells under way; nothing is left of those that are finished.")] = Path("runs/reproduce"),
    record: Annotated[Path | None, typer.Option("--out", help="The record; otherwise results/STUDY.json.", metavar="FILE.json")] = None,
) -> None:  # fmt: skip
    """Measure a named study again, with the figures of the source note beside ours; resumable, in parts, with a time budget."""
    import oneround.catalog  # noqa: F401
    from oneround.studies.named_study import cells as cells_of
    from oneround.studies.named_study import names, read_study, seeds_of

    if study is None:
        studies = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for head in ("study", "cells", "question"):
            studies.add_column(head, no_wrap=head == "study")
        for name in names():
            each = read_study(name)
            studies.add_row(name, str(len(cells_of(each))), escape(each.question))
        out.print(studies)
        print_line("Run one: oneround reproduce STUDY --data-dir DATA", wrap=True)
        return
    from oneround.cli.progress import SweepLive
    from oneround.studies.outcome import outcome
    from oneround.studies.reproduce import read_progress, trainings
    from oneround.studies.reproduce import reproduce as measure
    from oneround.studies.sweep import part_of

    chosen = read_study(study)
    local: dict[str, Any] = {"local.data_path": None if data_dir is None else str(data_dir), "local.device": device}
    overrides = [*(data_overrides(data) if data is not None else ())]
    overrides += [(key, value) for key, value in local.items() if value is not None]
    overrides += [parse_override(text) for text in sets or []]
    cells = cells_of(
        chosen,
        overrides,
        variants=variants or (),
        settings=settings or (),
        partitions=seeds_of(partitions) if partitions else (),
    )
    if part is not None:
        cells = [cell for training in part_of(trainings(cells), part) for cell in training]
    if listed:
        for cell in cells:
            print_line(cell.name)
        return
    record = record or Path("results") / f"{Path(study).stem}.json"
    if table:
        progress = read_progress(cells, record, known or ())
    else:
        with SweepLive(out) as live:
            progress = measure(cells, record, folder, known=known or (), minutes=minutes, emit=live.emit)
    if progress.runs:
        sheet = outcome(chosen, progress)
        print_wide(sheet.terminal())
        for line in sheet.notes:
            print_line(f"  {line}", wrap=True)
        print_line(f"{len(progress.runs)} of {len(cells)} cells are in {record}")
    if progress.left:
        print_line(f"{len(progress.left)} cells are left; the same command goes on")
    if progress.failed:
        raise RunError("\n".join(f"{cell.name}: {text}" for cell, text in progress.failed.items()))
