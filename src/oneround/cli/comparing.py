"""Commands for many runs: sweep, compare."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    print_line,
)
from oneround.config.load import checked, parse_override, read_mapping, read_yaml
from oneround.errors import Interrupted, RecipeError, RunError

if TYPE_CHECKING:
    from oneround.analysis.comparison import Group
    from oneround.analysis.sheets import Sheet

GOALS = [50.0, 60.0, 70.0, 80.0, 90.0]


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS…", help="Run folders, folders with run folders in them (a sweep), or records made with --keep.")],
    baseline: Annotated[str | None, typer.Option("--baseline", help="Method the others are compared with; otherwise the first.")] = None,
    rule: Annotated[str | None, typer.Option("--rule", help="A fusion rule, or all; otherwise the one that makes each run's model.")] = None,
    methods: Annotated[list[str] | None, typer.Option("--method", help="Only this method; may be given several times.", metavar="NAME")] = None,
    layout: Annotated[Literal["methods", "rounds", "lambda", "peaks", "anchors", "goals", "gradients", "costs"], typer.Option("--layout", help="methods; rounds × methods; λ per client and round; peak and final accuracy; prototypes seen from their anchors; epochs to each accuracy; cosines between gradients; top-5, loss, bytes and seconds of runs in any setting.")] = "methods",
    every: Annotated[int, typer.Option("--every", min=1, help="Show every so many epochs (rounds, lambda).")] = 1,
    goals: Annotated[list[float] | None, typer.Option("--goal", min=0, max=100, callback=finite, help="An accuracy in % for --layout goals; may be given several times.")] = None,
    interest: InterestOption = 1.0,
    common: Annotated[bool, typer.Option("--common", help="Use only partitions that all methods have.")] = False,
    target: Annotated[Path | None, typer.Option("--out", help="Write it: .md, .csv, .tex or .json.")] = None,
    record: Annotated[Path | None, typer.Option("--keep", help="Also write down the runs, to compare them again without their folders.", metavar="FILE.json")] = None,
) -> None:  # fmt: skip
    """Say which method is better and whether the difference is real: paired by partition, tested, in words."""
    from oneround.analysis import tables
    from oneround.analysis.comparison import compare as compare_runs
    from oneround.analysis.comparison import of_methods
    from oneround.analysis.sheets import SUFFIXES, render
    from oneround.files import write_durably
    from oneround.runs.archive import find_runs, keep

    if target is not None and target.suffix not in SUFFIXES:
        raise RecipeError(f"--out {target}: must end in {', '.join(SUFFIXES)}")
    makers: dict[str, Callable[[Group], Sequence[Sheet]]] = {
        "methods": lambda group: [tables.methods_sheet(group, interest)],
        "rounds": lambda group: [tables.rounds_sheet(group, every)],
        "lambda": lambda group: tables.lambda_sheets(group, every),
        "peaks": lambda group: [tables.peaks_sheet(group)],
        "anchors": lambda group: [tables.anchors_sheet(group)],
        "goals": lambda group: [tables.goals_sheet(group, goals or GOALS)],
        "gradients": lambda group: [tables.gradients_sheet(group)],
    }
    records = find_runs(runs)
    if layout == "costs":
        sheets: list[Sheet] = [tables.costs_sheet(of_methods(records, methods or ()))]
    else:
        groups = compare_runs(records, baseline, rule, common=common, only=methods or ())
        sheets = [sheet for group in groups for sheet in makers[layout](group)]
    if not sheets:
        raise RecipeError("none of these runs has a λ (alignment); --layout methods or rounds")
    if record is not None:
        keep(records, record)
        print_line(f"{len(records)} run{'s' * (len(records) > 1)} kept in {record}")
    if target is None:
        _print_sheets(sheets)
    else:
        write_durably(target, render(sheets, target.suffix).encode())
        print_line(f"written to {target}")


def _print_sheets(sheets: Iterable[Sheet]) -> None:
    for sheet in sheets:
        out.print(sheet.terminal())
        for line in [*sheet.verdicts(), *sheet.notes]:
            print_line(f"  {line}", wrap=True)


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
    minutes: Annotated[float | None, typer.Option("--minutes", min=0.01, help="Time budget: stop between two epochs; the same command resumes.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Cells at once; otherwise one per GPU, or per core.")] = None,
    ray: Annotated[str | None, typer.Option("--ray", help="Run the cells on a Ray cluster: its address, or local.", metavar="ADDRESS")] = None,
    part: Annotated[str | None, typer.Option("--part", help="Only a part of the cells: 2/5 is every fifth from the second on; oneround merge joins parts.", metavar="K/N")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder of the sweep: every cell is a run folder in it.")] = Path("sweeps/sweep"),
    baseline: Annotated[str | None, typer.Option("--baseline", help="Method the others are compared with.")] = None,
) -> None:  # fmt: skip
    """Run a grid of methods × α × partitions × seeds × any recipe key; resumable, side by side, with a time budget."""
    from oneround.analysis.comparison import compare as compare_runs
    from oneround.analysis.tables import methods_sheet
    from oneround.cli.progress import SweepLive
    from oneround.runs.archive import find_runs
    from oneround.studies.sweep import Grid, cells, part_of, read_grid
    from oneround.studies.sweep import sweep as run_all

    from_file = len(methods) == 1 and _is_sweep_file(Path(methods[0]))
    raw: dict[str, Any] = read_grid(methods[0]) if from_file else {"methods": methods}
    axes = {"alpha": alpha, "partitions": partitions, "seeds": seeds}
    raw |= {key: _values(key, text) for key, text in axes.items() if text is not None}
    raw["grid"] = {**raw.get("grid", {}), **_axes(grid or [])}
    overrides = dict(data_overrides(data)) if data is not None else {}
    raw["set"] = {**overrides, **raw.get("set", {}), **dict(parse_override(text) for text in sets or [])}
    local = {"local.data_path": None if data_dir is None else str(data_dir), "local.device": device}
    grid_cells = cells(checked(Grid, raw), [(key, value) for key, value in local.items() if value is not None])
    grid_cells = part_of(grid_cells, part) if part is not None else grid_cells
    try:
        with SweepLive(out) as live:
            progress = run_all(grid_cells, folder, minutes=minutes, workers=workers, ray=ray, emit=live.emit)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what is done is kept, the same command resumes") from None
    if progress.left:
        print_line(f"{len(progress.left)} cells are left, the time is over; the same command resumes.")
    if progress.done and part is not None:  # its methods may have no partition in common
        print_line(
            f"{len(progress.done)} cells of part {part} are in {folder}/; oneround merge joins parts of several folders"
        )
    elif progress.done:
        runs = find_runs([folder / name for name in progress.done])
        common = bool(progress.left or progress.failed)
        baseline = baseline or compare_runs(runs, common=common)[0].baseline.method
        _print_sheets(methods_sheet(group, 1.0) for group in compare_runs(runs, baseline, common=common))
        command = shlex.join(["oneround", "compare", str(folder), "--baseline", baseline, *["--common"] * common])
        print_line(f"Everything is in {folder}/; show this again with {command}")
    if progress.failed:
        raise RunError("\n".join(f"{name}: {text}" for name, text in progress.failed.items()))


def _is_sweep_file(path: Path) -> bool:
    """Whether this is the YAML file of a sweep and not of a recipe."""
    form = "a recipe is a YAML mapping (extends: fafi, …), a sweep one with methods: [...]"
    return path.is_file() and path.suffix in (".yaml", ".yml") and "methods" in read_mapping(path, form)


def _values(key: str, text: str) -> Any:
    """The values of an axis: `1-5` as it is, `1,2,7` as a list."""
    return text if "-" in text and "," not in text else read_yaml(f"[{text}]", f"--{key}")


def _axes(texts: Iterable[str]) -> dict[str, list[Any]]:
    """The `--grid` options: recipe key → values to try."""
    axes: dict[str, list[Any]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        key = key.strip()
        if not values:
            raise RecipeError(
                f"--grid {text}: write it as key=a,b,… for example --grid training.learning_rate=0.05,0.1"
            )
        if key in axes:
            raise RecipeError(f"--grid {key}: given twice; write all values in one")
        axes[key] = read_yaml(f"[{values}]", f"--grid {key}")
    return axes
