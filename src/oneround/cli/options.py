"""The application object, and the options that several commands share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from oneround.config.load import load, parse_override
from oneround.config.recipe import Recipe
from oneround.errors import DataError, RecipeError

app = typer.Typer(
    help="One-shot federated learning: every site trains once, uploads once, the server fuses one model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
out = Console()
err = Console(stderr=True)


def print_line(text: str, console: Console = out, *, wrap: bool = False) -> None:
    """Print text without markup or highlighting. `wrap`: break it between words; else a path in it can be copied."""
    console.print(text, highlight=False, markup=False, soft_wrap=not wrap)


def print_wide(table: Table) -> None:
    """Print a table in its full width: a narrow terminal breaks lines rather than numbers."""
    needed = Console(width=1000).measure(table).maximum
    Console(width=max(out.width, needed)).print(table)


RecipeArgument = Annotated[
    str,
    typer.Argument(help="A preset (see oneround methods), a recipe file (.yaml), or a run folder.", metavar="RECIPE"),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="digits, mnist, fashion-mnist, cifar10, cifar100, svhn, tiny-imagenet or gtsrb; an .npz file; "
        "or a folder of images by class.",
    ),
]
DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of the data files; otherwise the cache, filled by download.")
]
ClientsOption = Annotated[int | None, typer.Option("--clients", help="Number of clients.")]
AlphaOption = Annotated[float | None, typer.Option("--alpha", help="Dirichlet α: 0.05 is very skewed, 100 even.")]
PartitionOption = Annotated[
    str | None, typer.Option("--partition", help="dirichlet, dirichlet-overlap, shards, iid, quantity-skew or natural.")
]
EpochsOption = Annotated[int | None, typer.Option("--epochs", help="Local epochs before the one upload.")]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Sets the partition, initialisation and training seeds together.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, …")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Any recipe key, as often as you like: --set training.learning_rate=0.1", metavar="KEY=VALUE"
    ),
]
SiteSetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of a site file: --set local.threads=2", metavar="KEY=VALUE")
]


def finite(option: typer.CallbackParam, value: Any) -> Any:
    """Refuse numbers that are not finite: `nan` passes every minimum and maximum."""
    for each in value if isinstance(value, list) else [value]:
        if each is not None and not math.isfinite(each):
            raise RecipeError(f"{option.opts[0]} {each}: must be a number")
    return value


InterestOption = Annotated[
    float,
    typer.Option("--interest", min=0.01, callback=finite, help="Smallest difference in points that would matter."),
]
ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model, or a run folder.")]


KEYS = {
    "partition": "partition.kind",
    "clients": "partition.clients",
    "alpha": "partition.alpha",
    "model": "model.encoder.kind",
    "epochs": "training.epochs",
    "device": "local.device",
}
"""Short options → the recipe keys that they set."""


def make_recipe(
    source: str,
    *,
    data: str | None = None,
    data_dir: Path | None = None,
    seed: int | None = None,
    sets: list[str] | None = None,
    **short: Any,
) -> Recipe:
    """A recipe with the command line's short options (`short`: those in `KEYS`), then `--set`, on top."""
    import oneround.catalog  # noqa: F401 — brings PyTorch, so not before it is needed

    overrides: list[tuple[str, Any]] = data_overrides(data) if data is not None else []
    if data_dir is not None:
        overrides.append(("local.data_path", str(data_dir)))
    if seed is not None:
        overrides += [(f"seeds.{name}", seed) for name in ("partition", "initialisation", "training")]
    overrides += [(KEYS[name], value) for name, value in short.items() if value is not None]
    overrides += [parse_override(text) for text in sets or []]
    recipe = load(source, overrides)
    if short.get("epochs") is None or recipe.generator is None or recipe.trains:
        return recipe
    return load(source, [("generator.epochs", short["epochs"]), *overrides])  # the only network there is


def data_overrides(data: str) -> list[tuple[str, Any]]:
    """Recipe keys for `--data`: the name of a data set, an .npz file, or a folder of images."""
    from oneround.data import datasets

    if data in datasets.kinds:
        return [("data.kind", data)]
    if data.endswith(".npz"):
        return [("data.kind", "npz"), ("local.data_path", data)]
    if Path(data).is_dir():
        return [("data.kind", "images"), ("local.data_path", data)]
    if Path(data).name != data:
        raise DataError(f"--data {data}: no such folder")
    return [("data.kind", data)]
