"""Commands that run something: demo, run, partition."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from oneround.cli.options import (
    AlphaOption,
    ClientsOption,
    DataDirOption,
    DataOption,
    DeviceOption,
    EpochsOption,
    PartitionOption,
    RecipeArgument,
    SeedOption,
    SetOption,
    app,
    finite,
    make_recipe,
    out,
    print_line,
    print_wide,
)
from oneround.config.load import change
from oneround.config.recipe import Recipe
from oneround.processes import load_workers, may_use_workers

if TYPE_CHECKING:
    from oneround.analysis.diagnosis import Finding
    from oneround.runs.result import Result

WORKERS = "oneround.simulate.workers"
"""Named, not imported: the process that workers are forked from starts before this one loads PyTorch."""


@app.command()
def demo(
    partitions: Annotated[int, typer.Option(min=1, max=100, help="How many partitions (seeds 1, 2, …).")] = 3,
    folder: Annotated[Path | None, typer.Option("--out", help="Run folder; otherwise a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted demo in the same --out.")] = False,
    sets: SetOption = None,
) -> None:
    """See what one round can give: FAFI on real digits, five skewed clients, every fusion rule on the same uploads."""
    if may_use_workers(None):
        load_workers(WORKERS)
    from oneround.analysis.terminal import accuracy_table
    from oneround.cli.progress import Live
    from oneround.studies.study import study

    started = time.monotonic()
    run_folder = folder or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    recipe = make_recipe("demo", sets=sets)
    with Live(out, every_snapshot=False) as live:
        finished = study(recipe, run_folder, range(1, partitions + 1), resume=resume, emit=live.emit)
    out.print()
    title = f"FAFI on {recipe.data.kind}, {recipe.partition.label}: test accuracy in % over {partitions} partitions"
    out.print(accuracy_table(finished.accuracies, title, "average"))
    for seed, result in zip(finished.partitions, finished.results, strict=True):
        local = "  ".join(f"{100 * value:.1f}" for value in result.clients.values())
        print_line(f"partition {seed}, each client alone: {local}")
        for remark in result.remarks:
            print_line(f"partition {seed}: {remark}", wrap=True)
    print_line(f"{time.monotonic() - started:.0f} s. Everything is in {run_folder}/")
    print_line(f"  {run_folder}/accuracy.png   accuracy over local training")
    print_line(f"  {run_folder}/partition_1/partition.png   who holds what")
    print_line(f"  oneround predict {run_folder}/partition_1 IMAGE…   use the fused model")


@app.command()
def run(
    recipe: RecipeArgument,
    data: DataOption = None,
    data_dir: DataDirOption = None,
    clients: ClientsOption = None,
    alpha: AlphaOption = None,
    partition: PartitionOption = None,
    model: Annotated[
        str | None, typer.Option("--model", help="cnn, resnet18, resnet34, resnet50 or mobilenet-v2.")
    ] = None,
    epochs: EpochsOption = None,
    fusion: Annotated[
        str | None, typer.Option("--fusion", help="The rule that makes the model; the preset's others are scored too.")
    ] = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Run folder; otherwise one under runs/ that is named after the recipe.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an earlier run in the same folder was stopped.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option("--ray", help="Train the clients on a Ray cluster: its address, or local.", metavar="ADDRESS"),
    ] = None,
    ray_gpus: Annotated[
        float | None,
        typer.Option(
            "--ray-gpus",
            min=0,
            callback=finite,
            help="GPUs of a Ray worker: 0.25 for four on a card; default: 1, or none.",
        ),
    ] = None,
    sets: SetOption = None,
) -> None:
    """Run a method: all clients on this machine, one upload each, every fusion rule of the recipe scored."""
    if ray is None and may_use_workers(device):
        load_workers(WORKERS)  # in parallel to the imports here, which load PyTorch
    from oneround.analysis.diagnosis.diagnose import LiveDiagnosis
    from oneround.cli.progress import Live
    from oneround.simulate import run as simulate

    short = {
        "partition": partition,
        "clients": clients,
        "alpha": alpha,
        "model": model,
        "epochs": epochs,
        "device": device,
    }
    resolved = make_recipe(recipe, data=data, data_dir=data_dir, seed=seed, sets=sets, **short)
    if fusion is not None:
        named: list[str | dict[str, Any]] = [part.dump() for part in resolved.fusion if part.kind == fusion]
        others = [part.dump() for part in resolved.fusion if part.kind != fusion]
        resolved = change(resolved, {"fusion": [*(named or [fusion]), *others]})
    if folder is None:
        folder = Path(recipe) if resume and Path(recipe).is_dir() else Path("runs") / _run_name(resolved)
    started = time.monotonic()
    with Live(out) as live:

        def on_finding(finding: Finding) -> None:
            if finding.severity != "note":
                live.print_line(f"  {finding.summary}")

        emit = LiveDiagnosis(folder, on_finding, live.emit)
        result = simulate(resolved, folder, resume=resume, emit=emit, ray=ray, ray_gpus=ray_gpus)
    out.print()
    print_result(result)
    print_line(f"{time.monotonic() - started:.0f} s. Everything is in {folder}/")
    print_line("  accuracy.png  partition.png  result.json  metrics.jsonl  model/  uploads/")
    print_line(f"  oneround diagnose {folder}   what went wrong, if anything")
    print_line(f"  oneround report {folder}     everything in one page")


def print_result(result: Result) -> None:
    """Print the table of a finished run, what was chosen on validation images, and the remarks."""
    from oneround.analysis.terminal import score_table

    if result.rules:
        out.print(score_table(result.rules, result.clients))
    mixes = ", ".join(f"{name} {100 * value:.1f}" for name, value in result.personalised.items())
    if mixes:
        print_line(f"on each client's own mix of classes, mean: {mixes}", wrap=True)
    for rule, epoch in result.chosen.items():
        test, validation = 100 * result.curves[rule][epoch], 100 * result.validation[rule][epoch]
        print_line(
            f"chosen on validation data: {rule} at epoch {epoch}, {test:.2f} % (on validation {validation:.2f} %)"
        )
    for remark in result.remarks:
        print_line(f"note: {remark}", wrap=True)


def _run_name(recipe: Recipe) -> str:
    """`fafi-cifar10-dirichlet-clients5-alpha0.05-s1`"""
    partition = recipe.partition.label.replace("=", "").replace(" ", "-")
    return f"{recipe.method}-{recipe.data.kind}-{partition}-s{recipe.seeds.partition}"


@app.command(name="partition")
def show_partition(
    recipe: Annotated[str, typer.Argument(help="A preset, recipe file or run folder.")] = "fafi",
    data: DataOption = None,
    data_dir: DataDirOption = None,
    clients: ClientsOption = None,
    alpha: AlphaOption = None,
    partition: PartitionOption = None,
    seed: SeedOption = None,
    picture: Annotated[Path, typer.Option("--out", help="Where to draw it.")] = Path("partition.png"),
    sets: SetOption = None,
) -> None:
    """Show who would hold what, without training: a table here and a picture in a file."""
    from oneround.data import load_dataset
    from oneround.runs.pictures import draw_partition, picture_file
    from oneround.server.plan import deal

    picture = picture_file(picture, "partition.png")
    short = {"partition": partition, "clients": clients, "alpha": alpha}
    resolved = make_recipe(recipe, data=data, data_dir=data_dir, seed=seed, sets=sets, **short)
    dataset = load_dataset(resolved.data, resolved.local.data_path)
    dataset, split = deal(resolved, dataset)
    title = f"{dataset.name}, {resolved.partition.label}, seed {resolved.seeds.partition}"
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    columns = dataset.class_names[:20]
    for name in ("client", *columns, "all"):
        table.add_column(escape(name if len(name) <= 8 else f"{name[:7]}…"), justify="right", no_wrap=True)
    for number, counts in enumerate(split.counts.tolist()):
        table.add_row(str(number), *(str(n) if n else "·" for n in counts[: len(columns)]), str(sum(counts)))
    print_wide(table)
    if dataset.classes > len(columns):
        print_line(f"({dataset.classes - len(columns)} more classes are in the picture)")
    for remark in split.remarks():
        print_line(f"note: {remark}", wrap=True)
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_partition(split, dataset.class_names, picture, title)
    print_line(f"drawn in {picture}; digest {split.digest[:16]}")
