"""What smaller uploads cost: bytes and accuracy of fp16 and int8 against fp32, on the same trained networks.

    python benchmarks/encodings.py --out results/digits_encodings
    python benchmarks/encodings.py --data cifar10 --data-dir DATA --epochs 50 --model resnet18 --batch-size 512 --out results/cifar10_encodings
    python benchmarks/encodings.py --runs RUN... --data-dir DATA --out results/cifar10_encodings       # uploads that are there already
    python benchmarks/encodings.py --join RECORD.json... --out results/cifar10_encodings                # one page of what was measured in parts

Every client trains once; its upload is then packed and read under each encoding and scored by every rule. The cost is the mean
over partitions of the accuracy under an encoding minus that under fp32, in points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import markdown_head, markdown_row, parser_of, write_json
from oneround import acts
from oneround.config.load import change, load
from oneround.config.recipe import Recipe
from oneround.data import Dataset, load_dataset
from oneround.evaluate import score_uploads
from oneround.protocol import Broadcast, Upload, UploadFolder
from oneround.protocol.encoding import bytes_of, encoded_layout, layout_of
from oneround.runs.environment import environment
from oneround.runs.folder import RunFolder
from oneround.simulate import run
from oneround.site import Site
from study import check_alike, measured_on, merge_environments, sibling

ENCODINGS = ("fp32", "fp16", "int8")
UNRECORDED = ("data_dir", "out", "runs", "join")
FREE = ("alpha", "partitions")
"""Settings in which records that are joined may differ."""
Measured = dict[str, Any]
Figures = dict[str, Any]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", default="fafi")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--partitions", type=int, default=5)
    parser.add_argument(
        "--runs", type=Path, nargs="+", metavar="RUN", help="score the uploads of these finished runs; train nothing"
    )
    parser.add_argument("--join", type=Path, nargs="+", metavar="RECORD.json", help="measure nothing; join records")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.join:
        figures = joined(options.join)
    elif options.runs:
        figures = of_runs(options.runs, options.data_dir)
    else:
        figures = trained(options)
    text = table(figures)
    print(text)
    if options.out:
        write_json(sibling(options.out, ".json"), figures)
        sibling(options.out, ".md").write_text(text + "\n")


def joined(paths: list[Path]) -> Figures:
    """One record of several, which may differ in α and partitions; what is in two of them counts once."""
    records = [json.loads(path.read_text()) for path in paths]
    settings = [{key: value for key, value in record["settings"].items() if key not in FREE} for record in records]
    for path, its in zip(paths, settings, strict=True):
        check_alike(paths[0], settings[0], path, its)
    measured = {(one["alpha"], one["partition"]): one for record in records for one in record["measured"]}
    alphas = sorted({float(alpha) for alpha, _ in measured})
    described = {**settings[0], "alpha": ", ".join(map(str, alphas)), "partitions": len(measured)}
    return summary(
        list(measured.values()), described, merge_environments([record["environment"] for record in records])
    )


def of_runs(runs: list[Path], data_dir: str | None) -> Figures:
    """Score finished runs."""
    recipes = [change(load(str(run / "recipe.yaml"), []), {"local.data_path": data_dir}) for run in runs]
    recipe, data = recipes[0], load_dataset(recipes[0].data, recipes[0].local.data_path)
    alphas = sorted({one.partition.alpha for one in recipes})
    described = {
        "preset": recipe.method, "data": recipe.data.kind, "model": recipe.model.encoder.kind, "clients": recipe.partition.clients,
        "alpha": ", ".join(map(str, alphas)), "epochs": recipe.training.epochs, "partitions": len(recipes),
    }  # fmt: skip
    measured = [scored(run, one, data) for run, one in zip(runs, recipes, strict=True)]
    return summary(measured, described, environment(Site("", local=recipe.local).device))


def trained(options: argparse.Namespace) -> Figures:
    """Train on every partition and score."""
    overrides = {
        "data.kind": options.data, "local.data_path": options.data_dir, "model.encoder.kind": options.model, "snapshots": 0,
        "training.batch_size": options.batch_size, "training.epochs": options.epochs,
        "partition.clients": options.clients, "partition.alpha": options.alpha,
    }  # fmt: skip
    recipe = load(options.preset, overrides.items())
    data = load_dataset(recipe.data, recipe.local.data_path)
    seeds = range(1, options.partitions + 1)
    measured = [measure(change(recipe, {"seeds.partition": seed}), data) for seed in seeds]
    described = {key: value for key, value in vars(options).items() if key not in UNRECORDED}
    return summary(measured, described, environment(Site("", local=recipe.local).device))


def summary(measured: list[Measured], described: dict[str, object], where: dict[str, object]) -> Figures:
    """Cost of every encoding under every rule, in points, partition by partition."""
    rules = list(measured[0]["fp32"]["accuracy"])
    cost = {
        encoding: {
            rule: [100 * (one[encoding]["accuracy"][rule] - one["fp32"]["accuracy"][rule]) for one in measured]
            for rule in rules
        }
        for encoding in ENCODINGS[1:]
    }
    sizes = {encoding: measured[0][encoding]["bytes"] for encoding in ENCODINGS}
    return {
        "settings": {key: str(value) for key, value in described.items()},
        "bytes": sizes, "share_of_fp32": {encoding: sizes[encoding] / sizes["fp32"] for encoding in ENCODINGS},
        "cost_in_points": cost, "measured": measured, "environment": where,
    }  # fmt: skip


def measure(recipe: Recipe, data: Dataset) -> Measured:
    """Accuracy of every rule and bytes of an upload's tensors under every encoding, for one partition."""
    with tempfile.TemporaryDirectory() as folder:
        run(recipe, Path(folder) / "run", data=data)
        return scored(Path(folder) / "run", recipe, data)


def scored(done: Path, recipe: Recipe, data: Dataset) -> Measured:
    """The same for a finished run."""
    run_folder = RunFolder(done)
    trained, broadcast = list(run_folder.uploads()), Broadcast.read(run_folder.broadcast)
    site = Site("server", local=recipe.local)
    with tempfile.TemporaryDirectory() as folder:
        by_encoding = {
            encoding: encoded(trained, broadcast, encoding, data, site, Path(folder)) for encoding in ENCODINGS
        }
    return {"alpha": recipe.partition.alpha, "partition": recipe.seeds.partition, **by_encoding}


def encoded(
    trained: list[Upload], broadcast: Broadcast, encoding: str, data: Dataset, site: Site, folder: Path
) -> dict[str, object]:
    """Score these uploads in another encoding: write them, read them and score them."""
    federated = broadcast.recipe.model_copy(
        update={"upload": broadcast.recipe.upload.model_copy(update={"encoding": encoding})}
    )
    changed = replace(broadcast, recipe=federated)
    paths = [folder / encoding / f"{upload.client}.safetensors" for upload in trained]
    for upload, path in zip(trained, paths, strict=True):
        replace(upload, recipe_digest=changed.digest, encoding=encoding).write(path)
    uploads = UploadFolder(paths, changed, acts.statistics_of(changed))
    rules = {rule.label: rule for rule in acts.rules_of(federated)}
    scores, *_ = score_uploads(rules, uploads, changed, data.test, site)
    return {
        "accuracy": {name: score.accuracy for name, score in scores.items()},
        "bytes": bytes_of(encoded_layout(layout_of(uploads[0].weights | uploads[0].statistics), encoding)),
    }


def table(figures: Figures) -> str:
    """Change of accuracy in points, by encoding and rule: the mean over partitions and the worst partition."""
    settings, cost = figures["settings"], figures["cost_in_points"]
    rules = list(cost["fp16"])
    lines = [
        f"{settings['preset']} on {settings['data']}, {settings['model']}, {settings['clients']} clients, α = {settings['alpha']}, "
        f"{settings['epochs']} epochs, {settings['partitions']} partitions; the tensors of an upload's network are "
        + ", ".join(f"{size:,} bytes in {name}" for name, size in figures["bytes"].items()),
        "",
        *markdown_head(["encoding", "bytes / fp32", *rules]),
    ]
    for encoding, by_rule in cost.items():
        cells = [f"{statistics.mean(values):+.2f} (worst {min(values):+.2f})" for values in by_rule.values()]
        lines.append(markdown_row([encoding, f"{figures['share_of_fp32'][encoding]:.3f}", *cells]))
    environment = figures["environment"]
    return "\n".join([*lines, "", f"- {measured_on(environment, [environment['commit']])}"])


if __name__ == "__main__":
    main()
