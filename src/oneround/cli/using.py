"""Commands that work on what is already there: fuse, evaluate, predict, export, methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from oneround.cli.options import (
    DataDirOption,
    DataOption,
    DeviceOption,
    ModelArgument,
    SetOption,
    app,
    data_overrides,
    err,
    out,
)
from oneround.errors import DataError, ProtocolError, RecipeError
from oneround.parts import load_plugin
from oneround.reading import parse_override, parse_part, presets

if TYPE_CHECKING:
    from oneround.protocol import GlobalModel

PluginOption = Annotated[
    list[str] | None, typer.Option("--plugin", help="A module of yours with parts the model needs.", metavar="MODULE")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command()
def fuse(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with uploads.")],
    rule: Annotated[
        str, typer.Option("--rule", help="A fusion rule, or all: compare every rule the uploads allow.")
    ] = "all",
    target: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Where to write the model; otherwise RUN/fused/RULE, with who was left out or came late."
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="Leave out a client's upload, as if it had never taken part.", metavar="CLIENT"),
    ] = None,
    late: Annotated[
        list[Path] | None,
        typer.Option("--with", help="An upload that came late, as if it had been there.", metavar="CLIENT.safetensors"),
    ] = None,
    data_dir: DataDirOption = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the rule: --set beta=2", metavar="KEY=VALUE")
    ] = None,
) -> None:
    """Fuse uploads that are already there: by one rule (the model is written) or by all (they are compared)."""
    from oneround import acts
    from oneround.data import load_dataset
    from oneround.evaluate import score_uploads
    from oneround.folder import RunFolder
    from oneround.fusion import rules
    from oneround.observe.tables import score_table
    from oneround.runs import server_of

    place = RunFolder(folder)
    recipe = place.read_recipe([("local.data_path", str(data_dir))] if data_dir else [])
    uploads = place.uploads(without or (), late or ())
    if rule == "all" and (sets or target):
        raise RecipeError("--set and --out are for one rule; name it with --rule")
    if rule == "all":
        chosen = [rules.parse(kind) for kind in sorted(rules.kinds)]
    else:
        options = dict(parse_override(text) for text in sets or [])
        chosen = [rules.of(parse_part("fusion", {"kind": rule, **options}))]
    there = load_dataset(recipe.data, recipe.local.data_path)
    site = server_of(recipe, there, folder)
    usable = []
    for each in chosen:
        lacking = acts.lacking(each, uploads.broadcast)
        if each.between_rounds and uploads.broadcast.weights:
            why, fix = "it acts between rounds and cannot be applied afterwards", "run it, or choose another rule"
        elif lacking:
            why = f"these uploads do not carry what it needs ({', '.join(lacking)})"
            fix = "name it in the recipe's fusion list and run again"
        elif rule == "all" and each.needs_public and site.data is None:
            why, fix = "the server has no public images", ""
        else:
            usable.append(each)
            continue
        if rule != "all":
            raise ProtocolError(f"{each.kind}: {why}; {fix}")
        err.print(f"{each.kind} is left out: {why}", highlight=False)
    named = {each.label: each for each in usable}
    made: dict[str, GlobalModel] = {}
    if len(there.test):
        scores, alone, _ = score_uploads(named, uploads, uploads.broadcast, there.test, site, made)
        out.print(score_table(*({name: score.accuracy for name, score in part.items()} for part in (scores, alone))))
    elif rule == "all":
        raise DataError(f"{folder}: no test images here to compare rules on; name one with --rule, or give --data-dir")
    if rule != "all":
        written = target or folder / "fused" / _named(rule, without or (), late or ())
        (made.get(usable[0].label) or acts.fuse(uploads, uploads.broadcast, site, usable[0])).save(written)
        out.print(f"model written to {written}/", highlight=False)


def _named(rule: str, without: Sequence[str], late: Sequence[Path]) -> str:
    """What a model is called: its rule, and whose uploads it lacks or has besides."""
    others = sorted({f"-without-{name}" for name in without} | {f"-with-{path.stem}" for path in late})
    name = rule + "".join(others)
    return name if len(name.encode()) < 120 else f"{rule}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


@app.command()
def evaluate(
    folder: ModelArgument,
    data: DataOption = None,
    data_dir: DataDirOption = None,
    device: DeviceOption = "auto",
    plugins: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a saved model on the test images of a data set (its own, unless another is named)."""
    from oneround.data import load_dataset
    from oneround.evaluate import score_model
    from oneround.site import choose_device

    model = load_model(folder, plugins, streamed=True)
    wanted: dict[str, Any] = dict(data_overrides(data)) if data else {"data.kind": model.recipe.data.dump()}
    path = data_dir or wanted.get("local.data_path")
    there = load_dataset(parse_part("data", wanted["data.kind"]), Path(path) if path else None)
    if there.shape != model.shape or there.classes != len(model.class_names):
        raise DataError(
            f"{there.name}: images {there.shape} of {there.classes} classes; "
            f"this model takes {model.shape} and knows {len(model.class_names)} classes"
        )
    if not len(there.test):
        raise DataError(
            f"{there.name}: no test images here; name some with --data-dir, or another data set with --data"
        )
    score = score_model(model, there.test, choose_device(device or "auto"))
    if as_json:
        typer.echo(json.dumps({"data": there.name, "rule": model.rule.label, **score.plain()}))
        return
    title = f"{model.rule.label} on {there.name}: {100 * score.accuracy:.2f} % of {score.samples:,} test images"
    table = Table(title=title, title_justify="left", title_style="bold")
    for head in ("class", "%", "most often taken for"):
        table.add_column(head, justify="right" if head == "%" else "left")
    for label, (name, value) in enumerate(zip(model.class_names, score.per_class, strict=True)):
        wrong = [0 if other == label else count for other, count in enumerate(score.confusion[label])]
        worst = wrong.index(max(wrong))
        shown = "–" if value is None else f"{100 * value:.1f}"
        table.add_row(name, shown, f"{model.class_names[worst]} ({wrong[worst]})" if wrong[worst] else "")
    out.print(table)


@app.command()
def predict(
    folder: ModelArgument,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…", help="Image files.")],
    plugins: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what image files show."""
    import torch

    model = load_model(folder, plugins)
    probabilities = model.predict(torch.stack([model.read_image(path) for path in images]))
    for path, row in zip(images, probabilities.tolist(), strict=True):
        if as_json:
            told = {"file": str(path), "probabilities": dict(zip(model.class_names, row, strict=True))}
            typer.echo(json.dumps(told, ensure_ascii=False))
            continue
        best = sorted(range(len(row)), key=lambda label: -row[label])[:3]
        typer.echo(f"{path}: " + ", ".join(f"{model.class_names[label]} {row[label]:.1%}" for label in best))


@app.command()
def export(
    folder: ModelArgument,
    target: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="Where to write it.")],
    plugins: PluginOption = None,
) -> None:
    """Write a saved model as ONNX and check it with onnxruntime."""
    if target.suffix != ".onnx":
        raise DataError(f"{target}: name a file that ends in .onnx")
    model = load_model(folder, plugins)
    difference = model.to_onnx(target)
    out.print(
        f"{target}: images (n, {', '.join(map(str, model.shape))}) in 0…1 → scores (n, {len(model.class_names)})",
        highlight=False,
    )
    out.print(f"onnxruntime gives the model's own scores to within {difference:.2g}", highlight=False)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Explain one preset, by name or alias.")] = None,
    model: Annotated[str, typer.Option("--model", help="The encoder that bytes are counted for.")] = "resnet18",
    classes: Annotated[int, typer.Option("--classes", min=2, help="How many classes.")] = 10,
    public: Annotated[
        int, typer.Option("--public", min=1, help="Public images at the server, where a method needs some.")
    ] = 5000,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the presets with what crosses the network, or explain one with its formula."""
    from oneround.describe import describe

    chosen = [name] if name else list(presets())
    overrides = [parse_override(text) for text in sets or []]
    told = [describe(each, model, classes, public, overrides) for each in chosen]
    if as_json:
        typer.echo(json.dumps([method.plain() for method in told], ensure_ascii=False, indent=1))
        return
    if name:
        out.print("\n".join(told[0].lines()), highlight=False, markup=False)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("name", "alias", "down", "up", "idea"):
        table.add_column(head, no_wrap=head != "idea")
    for method in sorted(told, key=lambda method: (int(method.alias[1:] or 99), method.name)):
        needs = f" [needs {', '.join(method.needs)}]" if method.needs else ""
        table.add_row(method.name, method.alias, method.down, method.up, escape(method.idea + needs))
    out.print(table)
    out.print(
        f"Bytes are per client, for {model} (or the encoder a preset names) and {classes} classes. Explain one: oneround methods NAME",
        highlight=False,
    )


def load_model(folder: Path, plugins: list[str] | None, *, streamed: bool = False) -> GlobalModel:
    """A model folder, or the model in a run folder (whose recipe names the plug-ins it needs)."""
    from oneround.folder import RunFolder
    from oneround.protocol import GlobalModel

    for module in plugins or []:
        load_plugin(module)
    if (folder / "model").is_dir():
        RunFolder(folder).read_recipe()
        folder = folder / "model"
    return GlobalModel.load(folder, streamed=streamed)
