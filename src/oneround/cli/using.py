"""Commands that use a run's uploads and models, and the list of methods: fuse, evaluate, predict, export, methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
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
    print_line,
)
from oneround.config.load import parse_override, parse_part, presets
from oneround.config.parts import load_plugin
from oneround.errors import DataError, ProtocolError, RecipeError

if TYPE_CHECKING:
    from oneround.fusion import Rule
    from oneround.global_model import GlobalModel
    from oneround.protocol import Broadcast

PluginOption = Annotated[
    list[str] | None, typer.Option("--plugin", help="A module of yours with parts the model needs.", metavar="MODULE")
]
TransductiveOption = Annotated[
    bool,
    typer.Option(
        "--transductive",
        help="Batch norm uses the statistics of shuffled test batches (256 images, or the recipe's evaluation.batch_size).",
    ),
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
        typer.Option("--with", help="Add an upload that arrived late.", metavar="CLIENT.safetensors"),
    ] = None,
    data_dir: DataDirOption = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the rule: --set beta=2", metavar="KEY=VALUE")
    ] = None,
    transductive: TransductiveOption = False,
) -> None:
    """Fuse a run's uploads again: by one rule, whose model is written, or by all rules, which are compared."""
    from oneround import acts
    from oneround.analysis.terminal import score_table
    from oneround.data import load_dataset
    from oneround.evaluate import score_uploads
    from oneround.fusion import rules
    from oneround.models.inference import check_transductive
    from oneround.runs.folder import RunFolder
    from oneround.server.plan import plan_run

    if rule == "all" and (sets or target):
        raise RecipeError("--set and --out are for one rule; name it with --rule")
    run_folder = RunFolder(folder)
    recipe = run_folder.read_recipe([("local.data_path", str(data_dir))] if data_dir else [])
    uploads = run_folder.uploads(without or (), late or ())
    epochs = _epochs_of(uploads.paths)
    if len(epochs) > 1:
        numbers = ", ".join(map(str, epochs))
        print_line(
            f"uploads are of different epochs ({numbers}): the run was stopped before every client reached the same epoch",
            err,
        )
    elif run_folder.result.exists():
        of_model = run_folder.read_result().get("model", {}).get("epoch", epochs[0])  # version 0.1.0 did not write it
        if of_model != epochs[0]:
            print_line(
                f"uploads are of epoch {epochs[0]}; the run's model is of epoch {of_model}, the best on validation images",
                err,
            )
    options = dict(parse_override(text) for text in sets or [])
    if "kind" in options:
        raise RecipeError(f"--set kind={options['kind']}: the rule is named with --rule")
    candidates = _every_rule() if rule == "all" else [rules.of(parse_part("fusion", {"kind": rule, **options}))]
    dataset = load_dataset(recipe.data, recipe.local.data_path)
    site = plan_run(recipe, dataset).server(folder)
    usable: dict[str, Rule] = {}
    for candidate in candidates:
        why, fix = _obstacle(candidate, uploads.broadcast)
        if rule == "all" and candidate.needs.public and site.data is None:
            why = why or "the server has no public images"
        if not why:
            usable[candidate.label] = candidate
        elif rule == "all":
            print_line(f"{candidate.kind} is left out: {why}", err)
        else:
            raise ProtocolError(f"{candidate.kind}: {why}; {fix}")
    models: dict[str, GlobalModel] = {}
    if len(dataset.test):
        batch = recipe.evaluation.transductive
        if transductive:
            batch = recipe.evaluation.batch_size
            check_transductive(recipe, dataset.shape[0], dataset.classes, len(dataset.test))
        scores, clients, *_ = score_uploads(usable, uploads, uploads.broadcast, dataset.test, site, models, None, batch)
        out.print(score_table(*({name: score.accuracy for name, score in part.items()} for part in (scores, clients))))
    elif rule == "all":
        raise DataError(f"{folder}: no test images here to compare rules on; name one with --rule, or give --data-dir")
    if rule != "all":
        model_folder = target or folder / "fused" / _model_name(rule, without or (), late or ())
        ((label, single),) = usable.items()
        (models.get(label) or acts.fuse(uploads, uploads.broadcast, site, single)).save(model_folder)
        print_line(f"model written to {model_folder}/")


def _every_rule() -> list[Rule]:
    """Every registered rule with its default options; one that has an option without a default is left out, with a message."""
    from oneround.fusion import rules

    with_defaults = []
    for kind in sorted(rules.kinds):
        try:
            with_defaults.append(rules.of(parse_part("fusion", kind)))
        except RecipeError as error:
            why = "; ".join(str(error).splitlines())
            print_line(f"{kind} is left out: {why} (--rule {kind} --set OPTION=VALUE)", err)
    return with_defaults


def _obstacle(rule: Rule, broadcast: Broadcast) -> tuple[str, str]:
    """Why a rule cannot fuse uploads for this broadcast, and what to do; both empty if it can."""
    from oneround import acts

    missing = acts.missing_inputs(rule, broadcast)
    if rule.needs.state and broadcast.weights:
        return "it acts between rounds and cannot be applied afterwards", "run it, or choose another rule"
    if missing:
        why = f"these uploads do not carry what it needs ({', '.join(missing)})"
        return why, "name it in the recipe's fusion list and run again"
    return "", ""


def _epochs_of(uploads: Sequence[Path]) -> list[int]:
    """The epochs of uploads, sorted and without repeats; a damaged upload is skipped here and refused when it is fused."""
    from oneround.protocol import blob

    epochs = set()
    for path in uploads:
        with suppress(ProtocolError, KeyError, TypeError, ValueError):
            epochs.add(int(blob.peek(path, "upload")["epoch"]))
    return sorted(epochs)


def _model_name(rule: str, without: Sequence[str], late: Sequence[Path]) -> str:
    """Folder name of a fused model: its rule, and whose uploads were left out or added."""
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
    transductive: TransductiveOption = False,
    as_json: JsonOption = False,
) -> None:
    """Score a saved model on the test images of a data set (its own, unless another is named)."""
    from oneround.data import load_dataset
    from oneround.evaluate import score_model, transductive_name
    from oneround.models.inference import check_transductive
    from oneround.runs.folder import RunFolder
    from oneround.site import choose_device

    model = load_model(folder, plugins, streamed=True)
    requested: dict[str, Any] = dict(data_overrides(data)) if data else {"data.kind": model.recipe.data.dump()}
    path = data_dir or requested.get("local.data_path")
    run_dir = next(
        (each for each in (folder, *folder.absolute().parents[:2]) if (each / "recipe.yaml").is_file()), None
    )
    if path is None and data is None and run_dir is not None:
        path = RunFolder(run_dir).read_recipe().local.data_path
    dataset = load_dataset(parse_part("data", requested["data.kind"]), Path(path) if path else None)
    if dataset.shape != model.shape or dataset.classes != len(model.class_names):
        raise DataError(
            f"{dataset.name}: images {dataset.shape} of {dataset.classes} classes; "
            f"this model takes {model.shape} and knows {len(model.class_names)} classes"
        )
    if not len(dataset.test):
        raise DataError(
            f"{dataset.name}: no test images here; name some with --data-dir, or another data set with --data"
        )
    rule, batch = model.rule.label, None
    if transductive:
        batch = model.recipe.evaluation.batch_size
        check_transductive(model.recipe, model.shape[0], len(model.class_names), len(dataset.test))
        rule = transductive_name(rule, batch)
    score = score_model(model, dataset.test, choose_device(device or "auto"), batch)
    if as_json:
        typer.echo(json.dumps({"data": dataset.name, "rule": rule, **score.plain()}))
        return
    title = f"{rule} on {dataset.name}: {100 * score.accuracy:.2f} % of {score.samples:,} test images"
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for head in ("class", "%", "most often taken for"):
        table.add_column(head, justify="right" if head == "%" else "left")
    for label, (name, value) in enumerate(zip(model.class_names, score.per_class, strict=True)):
        wrong = [0 if other == label else count for other, count in enumerate(score.confusion[label])]
        worst = wrong.index(max(wrong))
        accuracy = "–" if value is None else f"{100 * value:.1f}"
        confused = f"{model.class_names[worst]} ({wrong[worst]})" if wrong[worst] else ""
        table.add_row(escape(name), accuracy, escape(confused))
    out.print(table)


@app.command()
def predict(
    folder: ModelArgument,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…", help="Image files.")],
    plugins: PluginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Classify image files."""
    import torch

    model = load_model(folder, plugins)
    probabilities = model.predict(torch.stack([model.read_image(path) for path in images]))
    for path, row in zip(images, probabilities.tolist(), strict=True):
        if as_json:
            prediction = {"file": str(path), "probabilities": dict(zip(model.class_names, row, strict=True))}
            typer.echo(json.dumps(prediction, ensure_ascii=False))
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
    print_line(
        f"{target}: images (n, {', '.join(map(str, model.shape))}) in 0…1 → scores (n, {len(model.class_names)})"
    )
    print_line(f"onnxruntime gives the model's own scores to within {difference:.2g}")


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
    from oneround.analysis.describe import describe

    chosen = [name] if name else list(presets())
    overrides = [parse_override(text) for text in sets or []]
    described = [describe(each, model, classes, public, overrides) for each in chosen]
    if as_json:
        typer.echo(json.dumps([method.plain() for method in described], ensure_ascii=False, indent=1))
        return
    if name:
        print_line("\n".join(described[0].lines()), wrap=True)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("name", "alias", "down", "up", "idea"):
        table.add_column(head, no_wrap=head != "idea")
    for method in sorted(described, key=lambda method: (int(method.alias[1:] or 99), method.name)):
        needs = f" [needs {', '.join(method.needs)}]" if method.needs else ""
        table.add_row(method.name, method.alias, method.down, method.up, escape(method.idea + needs))
    out.print(table)
    counted = f"Bytes are per client, for {model} (or the encoder a preset names) and {classes} classes."
    print_line(f"{counted} Explain one: oneround methods NAME", wrap=True)


def load_model(folder: Path, plugins: list[str] | None, *, streamed: bool = False) -> GlobalModel:
    """The model in a model folder or in a run folder, whose recipe names the plug-ins it needs; `plugins` are loaded first."""
    from oneround.global_model import GlobalModel
    from oneround.runs.folder import RunFolder

    for module in plugins or []:
        load_plugin(module)
    if (folder / "model").is_dir():
        RunFolder(folder).read_recipe()
        folder = folder / "model"
    return GlobalModel.load(folder, streamed=streamed)
