"""Commands that run something: demo, run, partition."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oneround.cli.options import (
    AlphaOption,
    ClientsOption,
    DataDirOption,
    DataOption,
    DeviceOption,
    PartitionOption,
    RecipeArgument,
    SeedOption,
    SetOption,
    app,
    make_recipe,
    out,
)
from oneround.reading import change
from oneround.recipe import Recipe

if TYPE_CHECKING:
    from oneround.observe.diagnosis import Finding


@app.command()
def demo(
    partitions: Annotated[int, typer.Option(min=1, max=100, help="How many partitions (seeds 1, 2, …).")] = 3,
    folder: Annotated[Path | None, typer.Option("--out", help="Run folder; otherwise a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted demo in the same --out.")] = False,
    sets: SetOption = None,
) -> None:
    """See what one round can give: FAFI on real digits, five skewed clients, every fusion rule on the same uploads."""
    from oneround.observe.progress import Live
    from oneround.observe.tables import terminal_table
    from oneround.study import accuracies, study, table_rows

    started = time.monotonic()
    place = folder or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    recipe = make_recipe("demo", sets=sets)
    with Live(out, every_snapshot=False) as live:
        finished = study(recipe, place, range(1, partitions + 1), resume=resume, emit=live.emit)
    out.print()
    title = f"FAFI on {recipe.data.kind}, {recipe.partition.label}: test accuracy in % over {partitions} partitions"
    out.print(terminal_table(table_rows(accuracies(finished.record()), "average"), title, "average"))
    for seed, result in zip(finished.partitions, finished.results, strict=True):
        alone = "  ".join(f"{100 * value:.1f}" for value in result.clients.values())
        out.print(f"partition {seed}, each client alone: {alone}", highlight=False)
        for remark in result.remarks:
            out.print(f"partition {seed}: {escape(remark)}", highlight=False)
    out.print(f"{time.monotonic() - started:.0f} s. Everything is in {place}/", highlight=False, soft_wrap=True)
    out.print(f"  {place}/accuracy.png   accuracy over local training", highlight=False, soft_wrap=True)
    out.print(f"  {place}/partition_1/partition.png   who holds what", highlight=False, soft_wrap=True)
    out.print(f"  oneround predict {place}/partition_1 IMAGE…   use the fused model", highlight=False, soft_wrap=True)


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
    epochs: Annotated[int | None, typer.Option("--epochs", help="Local epochs before the one upload.")] = None,
    fusion: Annotated[
        str | None, typer.Option("--fusion", help="The rule that makes the model; the preset's others are scored too.")
    ] = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Run folder; otherwise named after the recipe, under runs/.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an earlier run in the same folder was stopped.")
    ] = False,
    sets: SetOption = None,
) -> None:
    """Run a method: all clients on this machine, one upload each, every fusion rule of the recipe scored."""
    from oneround.diagnose import live as watch
    from oneround.observe.progress import Live
    from oneround.observe.tables import score_table
    from oneround.simulate import run as simulate

    changes = {
        "partition.kind": partition,
        "partition.clients": clients,
        "partition.alpha": alpha,
        "model.encoder.kind": model,
        "training.epochs": epochs,
        "local.device": device,
    }
    resolved = make_recipe(recipe, data=data, data_dir=data_dir, seed=seed, changes=changes, sets=sets)
    if fusion is not None:
        named: list[str | dict[str, Any]] = [part.dump() for part in resolved.fusion if part.kind == fusion]
        others = [part.dump() for part in resolved.fusion if part.kind != fusion]
        resolved = change(resolved, {"fusion": [*(named or [fusion]), *others]})
    if folder is None:
        folder = Path(recipe) if resume and Path(recipe).is_dir() else Path("runs") / _run_name(resolved)
    started = time.monotonic()
    with Live(out) as live:

        def tell(found: Finding) -> None:
            if found.severity != "note":
                live.say(f"  {found.words}")

        result = simulate(resolved, folder, resume=resume, emit=watch(folder, tell, live.emit))
    out.print()
    out.print(score_table(result.rules, result.clients))
    mixes = ", ".join(f"{name} {100 * value:.1f}" for name, value in result.personalised.items())
    if mixes:
        out.print(f"on each client's own mix of classes, mean: {mixes}", highlight=False)
    for rule, epoch in result.chosen.items():
        shown = f"{100 * result.curves[rule][epoch]:.2f} % (on validation {100 * result.validation[rule][epoch]:.2f} %)"
        out.print(f"chosen on validation data: {rule} at epoch {epoch}, {shown}", highlight=False)
    for remark in result.remarks:
        out.print(f"note: {escape(remark)}", highlight=False)
    out.print(f"{time.monotonic() - started:.0f} s. Everything is in {folder}/", highlight=False, soft_wrap=True)
    out.print("  accuracy.png  partition.png  result.json  metrics.jsonl  model/  uploads/", highlight=False)
    out.print(f"  oneround diagnose {folder}   what went wrong, if anything", highlight=False, soft_wrap=True)
    out.print(f"  oneround report {folder}     everything in one page", highlight=False, soft_wrap=True)


def _run_name(recipe: Recipe) -> str:
    """`fafi-cifar10-dirichlet-clients5-alpha0.05-s1`"""
    return "-".join(
        [
            recipe.method,
            recipe.data.kind,
            *recipe.partition.label.replace("=", "").split(),
            f"s{recipe.seeds.partition}",
        ]
    )


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
    from oneround.data import load_dataset, partitions
    from oneround.observe.pictures import draw_partition, picture_file

    picture = picture_file(picture, "partition.png")
    changes = {"partition.kind": partition, "partition.clients": clients, "partition.alpha": alpha}
    resolved = make_recipe(recipe, data=data, data_dir=data_dir, seed=seed, changes=changes, sets=sets)
    there = load_dataset(resolved.data, resolved.local.data_path)
    split = partitions.of(resolved.partition).split(
        there, resolved.seeds.partition, resolved.public, resolved.validation, resolved.clients_hold_back
    )
    title = f"{there.name}, {resolved.partition.label}, seed {resolved.seeds.partition}"
    table = Table(title=title, title_justify="left", title_style="bold")
    shown = there.class_names[:20]
    for name in ("client", *shown, "all"):
        table.add_column(name if len(name) <= 8 else f"{name[:7]}…", justify="right", no_wrap=True)
    for number, counts in enumerate(split.counts.tolist()):
        table.add_row(str(number), *(str(n) if n else "·" for n in counts[: len(shown)]), str(sum(counts)))
    needed = Console(width=1000).measure(table).maximum
    Console(width=max(out.width, needed)).print(table)  # a narrow terminal breaks lines rather than numbers
    if there.classes > len(shown):
        out.print(f"({there.classes - len(shown)} more classes are in the picture)", highlight=False)
    for remark in split.remarks():
        out.print(f"note: {remark}", highlight=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_partition(split, there.class_names, picture, title)
    out.print(f"drawn in {picture}; digest {split.digest[:16]}", highlight=False, soft_wrap=True)
