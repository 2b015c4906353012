"""Commands for several runs together: sweep makes them, compare judges them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from oneround.cli.options import (
    DataDirOption,
    DataOption,
    DeviceOption,
    InterestOption,
    SetOption,
    app,
    data_overrides,
    finite,
    out,
)
from oneround.errors import Interrupted, RecipeError, RunError
from oneround.reading import checked, parse_override, read_yaml

GOALS = [50.0, 60.0, 70.0, 80.0, 90.0]
FORMATS = {".md": "md", ".csv": "csv", ".tex": "tex", ".json": "json"}


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS…", help="Run folders, folders with run folders in them (a sweep), or records made with --keep.")],
    baseline: Annotated[str | None, typer.Option("--baseline", help="Method the others are compared with; otherwise the first.")] = None,
    rule: Annotated[str | None, typer.Option("--rule", help="A fusion rule, or all; otherwise the one that makes each run's model.")] = None,
    methods: Annotated[list[str] | None, typer.Option("--method", help="Only this method; may be given several times.", metavar="NAME")] = None,
    layout: Annotated[Literal["methods", "rounds", "lambda", "peaks", "goals", "gradients"], typer.Option("--layout", help="methods; rounds × methods; λ per client and round; peaks and falls; how soon it is how good; angles between gradients.")] = "methods",
    every: Annotated[int, typer.Option("--every", min=1, help="Show every so many epochs (rounds, lambda).")] = 1,
    goals: Annotated[list[float] | None, typer.Option("--goal", min=0, max=100, callback=finite, help="An accuracy in % for --layout goals; may be given several times.")] = None,
    interest: InterestOption = 1.0,
    common: Annotated[bool, typer.Option("--common", help="Use only partitions that all methods have.")] = False,
    target: Annotated[Path | None, typer.Option("--out", help="Write it: .md, .csv, .tex or .json.")] = None,
    record: Annotated[Path | None, typer.Option("--keep", help="Also write down the runs, to compare them again without their folders.", metavar="FILE.json")] = None,
) -> None:  # fmt: skip
    """Say which method is better and whether the difference is real: paired by partition, tested, in words."""
    from oneround import layouts
    from oneround.compare import compare as grouped
    from oneround.finished import find_runs, keep
    from oneround.observe.formats import written
    from oneround.protocol import blob

    if target is not None and target.suffix not in FORMATS:
        raise RecipeError(f"--out {target}: must end in {', '.join(FORMATS)}")
    found = find_runs(runs)
    groups = grouped(found, baseline, rule, common=common, only=methods or ())
    sheets = []
    for group in groups:
        if layout == "methods":
            sheets.append(layouts.methods_sheet(group, interest))
        elif layout == "rounds":
            sheets.append(layouts.rounds_sheet(group, every))
        elif layout == "peaks":
            sheets.append(layouts.peaks_sheet(group))
        elif layout == "goals":
            sheets.append(layouts.goals_sheet(group, goals or GOALS))
        elif layout == "gradients":
            sheets.append(layouts.gradients_sheet(group))
        else:
            sheets += layouts.lambda_sheets(group, every)
    if not sheets:
        raise RecipeError("none of these runs has a λ (alignment); --layout methods or rounds")
    if record is not None:
        keep(found, record)
        out.print(f"{len(found)} runs kept in {record}", highlight=False, soft_wrap=True)
    if target is not None:
        blob.write_durably(target, written(sheets, FORMATS[target.suffix]).encode())
        out.print(f"written to {target}", highlight=False)
        return
    for sheet in sheets:
        out.print(sheet.terminal())
        for line in [*sheet.verdicts(), *sheet.notes]:
            out.print(f"  {line}", highlight=False, markup=False)


@app.command()
def sweep(
    methods: Annotated[list[str], typer.Argument(metavar="METHODS… | SWEEP.yaml", help="Presets or recipe files, or one file that describes the sweep.")],
    alpha: Annotated[str | None, typer.Option("--alpha", help="Values of Dirichlet α: 0.05,0.5")] = None,
    partitions: Annotated[str | None, typer.Option("--partitions", help="Partition seeds: 1-5, or 1,2,7")] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Initialisation and training seeds, repeats on the same partition: 1-3")] = None,
    grid: Annotated[list[str] | None, typer.Option("--grid", help="A recipe key and the values to try: alignment.weight.value=1,5,10", metavar="KEY=A,B,…")] = None,
    data: DataOption = None,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
    sets: SetOption = None,
    minutes: Annotated[float | None, typer.Option("--minutes", min=0.01, help="Stop between epochs after so long; the same command goes on.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Cells at once; otherwise one per GPU, or per core.")] = None,
    ray: Annotated[str | None, typer.Option("--ray", help="Run the cells on a Ray cluster: its address, or local.", metavar="ADDRESS")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder of the sweep: every cell is a run folder in it.")] = Path("sweeps/sweep"),
    baseline: Annotated[str | None, typer.Option("--baseline", help="Method the others are compared with.")] = None,
) -> None:  # fmt: skip
    """Run a grid of methods × α × partitions × seeds × any recipe key; resumable, side by side, with a time budget."""
    from oneround.compare import compare as grouped
    from oneround.finished import find_runs
    from oneround.layouts import methods_sheet
    from oneround.observe.progress import SweepLive
    from oneround.sweep import Grid, cells, read_grid
    from oneround.sweep import sweep as run_all

    raw: dict[str, Any] = (
        read_grid(Path(methods[0])) if len(methods) == 1 and _describes_a_sweep(methods[0]) else {"methods": methods}
    )
    given = {"alpha": alpha, "partitions": partitions, "seeds": seeds}
    raw |= {key: _values(key, text) for key, text in given.items() if text is not None}
    raw["grid"] = {**raw.get("grid", {}), **_axes(grid or [])}
    overrides = dict(data_overrides(data)) if data is not None else {}
    raw["set"] = {**overrides, **raw.get("set", {}), **dict(parse_override(text) for text in sets or [])}
    local = {"local.data_path": None if data_dir is None else str(data_dir), "local.device": device}
    every = cells(checked(Grid, raw), [(key, value) for key, value in local.items() if value is not None])
    try:
        with SweepLive(out) as live:
            standing = run_all(every, folder, minutes=minutes, workers=workers, ray=ray, emit=live.emit)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what is done is kept, the same command goes on") from None
    if standing.left:
        out.print(f"{len(standing.left)} cells are left, the time is over; the same command goes on.", highlight=False)
    if standing.done:
        runs = find_runs([folder / name for name in standing.done])
        common = bool(standing.left or standing.failed)
        baseline = baseline or grouped(runs, common=common)[0].baseline.method
        for group in grouped(runs, baseline, common=common):
            sheet = methods_sheet(group, 1.0)
            out.print(sheet.terminal())
            for line in [*sheet.verdicts(), *sheet.notes]:
                out.print(f"  {line}", highlight=False, markup=False)
        again = shlex.join(["oneround", "compare", str(folder), "--baseline", baseline, *["--common"] * common])
        out.print(f"Everything is in {folder}/; look again with {again}", highlight=False, soft_wrap=True)
    if standing.failed:
        raise RunError("\n".join(f"{name}: {text}" for name, text in standing.failed.items()))


def _describes_a_sweep(name: str) -> bool:
    path = Path(name)
    if not path.is_file() or path.suffix not in (".yaml", ".yml"):
        return False
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError:
        return False  # a recipe that is none says so
    return isinstance(raw, dict) and "methods" in raw


def _values(key: str, text: str) -> Any:
    """`1-5` as it is, `1,2,7` as a list."""
    return text if "-" in text and "," not in text else read_yaml(f"[{text}]", f"--{key}")


def _axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    axes: dict[str, list[Any]] = {}
    for key, values in map(_axis, texts):
        if key in axes:
            raise RecipeError(f"--grid {key}: given twice; write all values in one")
        axes[key] = values
    return axes


def _axis(text: str) -> tuple[str, list[Any]]:
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise RecipeError(f"--grid {text}: write it as key=a,b,… for example --grid training.learning_rate=0.05,0.1")
    return key.strip(), read_yaml(f"[{values}]", f"--grid {key}")
