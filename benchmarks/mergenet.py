"""Does a small federated network learn from a large one through its parameters? MergeNet against its yardsticks, and the four questions of source note 003.

    python benchmarks/mergenet.py --data cifar10 --data-dir data --minutes 9        # a part of it; run again to go on
    python benchmarks/mergenet.py --methods fused fedavg --alphas 0.5 --seeds 1 2 3
    python benchmarks/mergenet.py --render results/cifar10_mergenet.json            # the page again, from the record

Clients train MobileNetV2, the teacher is ResNet-50, trained once per seed on the server's tenth of the images. All methods see the
same partitions, start from the same weights and use the same teacher:
    fused         the average looks at the teacher's parameters before it goes out again
    fused, unscaled   the same with rows as the layer norm leaves them, as published
    fedavg        plain averaging
    taught        the average learns the teacher's answers on the server's images
    alone         no exchange: every client trains as long on its own images
    pooled        the student on all clients' images in one place
    single        MergeNet on one machine: all images, student and teacher side by side
Finished cells are not repeated: runs are resumed from --runs, and OUT.json keeps its cells.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import markdown_head, markdown_row
from oneround.analysis.statistics import paired
from oneround.analysis.terminal import format_difference
from oneround.config.load import load, parse_override
from oneround.config.parts import slot
from oneround.config.recipe import Recipe
from oneround.data import load_dataset
from oneround.errors import OutOfTime
from oneround.fusion.average import single
from oneround.fusion.mergenet import accuracy
from oneround.mergenet import Teacher, teacher_of
from oneround.runs.log import MetricsLog
from oneround.server.plan import DealtPlan
from oneround.simulate import run
from oneround.site import Site, choose_device
from study import Cell, Record, Study, arguments, format_mean, only_pages

METHODS = ("fused", "fused, unscaled", "fedavg", "taught", "alone", "pooled", "single")
KEYS = ("method", "alpha", "seed")
THRESHOLDS = (0.5, 0.6, 0.7, 0.75)


def recipe_of(cell: Cell, options: argparse.Namespace) -> Recipe:
    """What a method is; everything that is not its point is the same for all."""
    method, alpha, seed = cell
    rounds, epochs = options.rounds, options.epochs
    teacher = {"from_file": True, "encoder": options.teacher}
    merge = {"kind": "mergenet", "teacher": teacher}
    preset, changes = {
        "fused": ("mergenet", {"fusion": [merge, "average"]}),
        "fused, unscaled": ("mergenet", {"fusion": [{**merge, "adapter": {"rescale": False}}, "average"]}),
        "fedavg": ("fedavg", {}),
        "taught": ("fedavg+taught", {"fusion": [{"kind": "taught", "teacher": teacher}, "average"]}),
        "alone": ("fedavg", {"rounds": 1, "training.epochs": rounds * epochs, "snapshots": epochs}),
        "pooled": ("fedavg", {"rounds": 1, "training.epochs": rounds * epochs, "partition.clients": 1, "snapshots": epochs}),
        "single": ("mergenet-single", {"training.epochs": rounds * epochs, "snapshots": epochs, "companion.teacher.encoder": options.teacher}),
    }[method]  # fmt: skip
    usual: dict[str, Any] = {
        "data.kind": options.data, "local.data_path": options.data_dir, "model.encoder": options.student, "rounds": rounds,
        "training.epochs": epochs, "training.schedule": "cosine", "training.milestones": [], "partition.alpha": alpha,
        "partition.clients": options.clients, "public": 0.1, "validation": 0.1, "validation_from": "public", "trace.every": 0,
        "local.checkpoint_seconds": 20.0, **{f"seeds.{kind}": seed for kind in ("partition", "initialisation", "training")},
    }  # fmt: skip
    if method == "single":
        usual |= {"rounds": 1, "partition.clients": 1}
    if method in ("fused", "fused, unscaled", "taught"):
        usual["local.teacher_weights"] = str(teachers_file(seed, options))
    return load(preset, [*{**usual, **changes}.items(), *(parse_override(text) for text in options.sets)])


def chosen_teacher(options: argparse.Namespace) -> Teacher:
    return Teacher(encoder=slot("encoder").parse(options.teacher), epochs=options.teacher_epochs)


def teachers_file(seed: int, options: argparse.Namespace) -> Path:
    """Where the teacher of a seed lies; another kind or a longer training is another file."""
    site = Site("server", folder=options.runs / f"teacher-{seed}")
    return site.state_folder(chosen_teacher(options)) / "teacher.safetensors"


def teach(seed: int, options: argparse.Namespace, data: Any) -> float:
    """Train the teacher of a seed unless it is there, once for all methods; its accuracy on test images."""
    recipe = load("mergenet", [
        ("data.kind", options.data), ("local.data_path", options.data_dir), ("model.encoder", options.student), ("public", 0.1), ("validation", 0.1),
        ("seeds.partition", seed), ("seeds.initialisation", seed), ("seeds.training", seed),
    ])  # fmt: skip
    plan = DealtPlan.of(recipe, data)
    server, broadcast = plan.server(options.runs / f"teacher-{seed}"), plan.prepare()
    chosen = chosen_teacher(options)
    with server.arithmetic(10**8):
        weights = teacher_of(chosen, broadcast, server, 0, "teacher.batch_size")
    large = broadcast.recipe.model_copy(
        update={"model": broadcast.recipe.model.model_copy(update={"encoder": chosen.encoder})}
    )
    return accuracy(
        single(weights, replace(broadcast, recipe=large), server), data.test, plan.recipe, choose_device("auto")
    )


def measure(cell: Cell, options: argparse.Namespace, data: Any, deadline: float) -> Record | None:
    """One run, or None if the time is over before it is finished."""
    method, alpha, seed = cell
    teacher = teach(seed, options, data)
    folder = options.runs / f"{method.replace(', ', '-')}-{alpha}-{seed}"
    try:
        result = run(recipe_of(cell, options), folder, data=data, resume=True, deadline=deadline)
    except OutOfTime:
        return None
    stored = json.loads((folder / "result.json").read_text())
    events = list(MetricsLog(folder / "metrics.jsonl"))
    epochs = options.epochs
    curve = [event for event in events if event["event"] == "snapshot" and event["rule"] == "average"]
    spread: dict[int, list[float]] = {}
    for event in events:
        if event["event"] == "client":
            spread.setdefault(event["epoch"] // epochs, []).append(event["accuracy"])
    return {
        "digest": result.partition, "teacher": teacher, "accuracy": result.rules["average"],
        "clients": dict(result.clients), "bytes_up": stored["bytes_up"], "bytes_down": stored["bytes_down"],
        "rounds": [
            {"round": event["epoch"] // epochs, **{key: event[key] for key in ("accuracy", "top5", "loss", "elapsed", "validation") if key in event}}
            for event in curve
        ],
        "sent": {event["epoch"] // epochs: event["accuracy"] for event in events if event["event"] == "snapshot" and event["rule"] != "average"},
        "clients_spread": {str(number): statistics.pstdev(values) for number, values in spread.items()},
        "clients_mean": {str(number): statistics.mean(values) for number, values in spread.items()},
        "fusions": [event for event in events if event["event"] == "fusion"],
        "seconds": curve[-1]["elapsed"],
    }  # fmt: skip


def page(record: Record) -> list[str]:
    cells = record["cells"]
    teachers = {cell["seed"]: cell["teacher"] for cell in cells}
    lines = [
        f"# MergeNet on {record['data']}\n",
        f"{record['student']} learns from {record['teacher']}; {record['clients']} clients, {record['rounds']} rounds of {record['epochs']} local epoch(s), "
        "cosine learning rate. The server keeps a tenth of the images (for the teacher, to teach and to choose by). Test accuracy in % of the last "
        "average, mean ± 95 % interval (each seed: partition, start and shuffles).\n",
        "The teacher alone: " + ", ".join(f"{100 * value:.1f} (seed {seed})" for seed, value in sorted(teachers.items())) + "\n",
    ]  # fmt: skip
    for alpha in sorted({cell["alpha"] for cell in cells}):
        same_alpha = [cell for cell in cells if cell["alpha"] == alpha]
        lines += [f"## α = {alpha:g}\n", *_table(same_alpha, record["rounds"]), ""]
    lines += ["## The four questions of source note 003\n", *_answers(cells), ""]
    return lines


def _table(cells: list[Record], rounds: int) -> list[str]:
    base = {cell["seed"]: cell for cell in cells if cell["method"] == "fedavg"}
    reached = [f"rounds (s) to {100 * threshold:.0f} %" for threshold in THRESHOLDS]
    heads = ["method", "top-1", "minus fedavg", "best", "top-5", "loss"]
    heads += [*reached, "spread of clients", "MB per round", "seconds"]
    lines = markdown_head(heads)
    for method in (method for method in METHODS if any(cell["method"] == method for cell in cells)):
        mine = [_fair(cell) for cell in cells if cell["method"] == method]
        last = [cell["rounds"][-1] for cell in mine]
        both = [(cell, base[cell["seed"]]) for cell in mine if cell["seed"] in base and method != "fedavg"]
        against = _difference(both)
        lines.append(markdown_row([
            method, format_mean([100 * cell["accuracy"] for cell in mine]), against,
            format_mean([100 * max(each["accuracy"] for each in cell["rounds"]) for cell in mine]),
            *(("–", "–") if method == "alone" else (f"{statistics.mean(100 * each['top5'] for each in last):.1f}", f"{statistics.mean(each['loss'] for each in last):.3f}")),
            *(_reached(mine, threshold) for threshold in THRESHOLDS),
            f"{100 * statistics.mean(list(cell['clients_spread'].values())[-1] for cell in mine):.1f}",
            f"{statistics.mean(cell['bytes_up'] + cell['bytes_down'] for cell in mine) / 1e6 / rounds:.0f}" if method not in ("pooled", "single", "alone") else "–",
            f"{statistics.mean(cell['seconds'] for cell in mine):.0f}",
        ]))  # fmt: skip
    return lines


def _reached(cells: list[Record], threshold: float) -> str:
    """First round (and second) at which the average is that good; how many seeds got there, if not all."""
    first = [next((each for each in cell["rounds"] if each["accuracy"] >= threshold), None) for cell in cells]
    hits = [each for each in first if each is not None]
    if not hits:
        return "never"
    text = f"{statistics.mean(each['round'] for each in hits):.1f} ({statistics.mean(each['elapsed'] for each in hits):.0f})"
    return text if len(hits) == len(cells) else f"{text}, {len(hits)} of {len(cells)}"


def _difference(both: list[tuple[Record, Record]]) -> str:
    mine, theirs = [100 * one["accuracy"] for one, _ in both], [100 * other["accuracy"] for _, other in both]
    if not both:
        return ""
    if len(both) == 1:
        return f"{mine[0] - theirs[0]:+.1f} (one seed)"
    return format_difference(paired(mine, theirs))


def _answers(cells: list[Record]) -> list[str]:
    """The questions in order, each with the differences that answer it, α by α."""
    questions = {
        "1. Does MergeNet work together with federated learning? Fused minus plain averaging": ("fused", "fedavg"),
        "   and against the same teacher's answers instead of its parameters: fused minus taught": ("fused", "taught"),
        "2. Is federated training with fusion better than fusion on one machine? Fused minus single": (
            "fused",
            "single",
        ),
        "3. Does averaging help? Fused minus the mean client that trains alone": ("fused", "alone"),
        "4. Is it as good while data stay where they are? Fused minus the student on pooled images": (
            "fused",
            "pooled",
        ),
    }
    lines = []
    for question, (one, other) in questions.items():
        differences = []
        for alpha in sorted({cell["alpha"] for cell in cells}):
            both = pairs_of(cells, one, other, alpha)
            if both:
                differences.append(f"α = {alpha:g}: {_difference(both)}")
        lines.append(f"- {question.strip()}: {'; '.join(differences) or 'not measured'}.")
    return lines


def pairs_of(cells: list[Record], one: str, other: str, alpha: float) -> list[tuple[Record, Record]]:
    """Cells of two methods with the same seed; what sees all images in one place has no α."""
    mine = {cell["seed"]: cell for cell in cells if (cell["method"], cell["alpha"]) == (one, alpha)}
    theirs = {cell["seed"]: _fair(cell) for cell in cells if cell["method"] == other and (cell["alpha"] == alpha or other in ("pooled", "single"))}  # fmt: skip
    return [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]


def _fair(cell: Record) -> Record:
    """A cell whose accuracy is that of the mean client, where nothing is exchanged."""
    if cell["method"] != "alone":
        return cell
    rounds = [
        {"round": each["round"], "elapsed": each["elapsed"], "accuracy": cell["clients_mean"][str(each["round"])]}
        for each in cell["rounds"]
    ]
    return {**cell, "accuracy": statistics.mean(cell["clients"].values()), "rounds": rounds}


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the study; from the command line unless `argv` is given."""
    parser = arguments(__doc__, "mergenet")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument(
        "--alphas", type=float, nargs="+", default=[0.5, 10.0, 100.0], help="all seeds on the first, one on the others"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--student", type=json.loads, default='"mobilenet-v2"', help="an encoder, as JSON")
    parser.add_argument("--teacher", type=json.loads, default='"resnet50"', help="an encoder, as JSON")
    parser.add_argument("--teacher-epochs", type=int, default=30)
    return parser.parse_args(argv)


def main() -> None:
    options = options_of()
    if only_pages(options, KEYS, page):
        return
    setting = {
        "data": options.data, "student": _name(options.student), "teacher": _name(options.teacher), "clients": options.clients,
        "rounds": options.rounds, "epochs": options.epochs,
    }  # fmt: skip
    recipe = load("fedavg", [("data.kind", options.data), ("local.data_path", options.data_dir)])
    data = load_dataset(recipe.data, recipe.local.data_path)
    once = [method for method in ("alone", "pooled", "single", "fused, unscaled") if method in options.methods]
    many = [method for method in ("fused", "fedavg", "taught") if method in options.methods]
    first, *others = options.alphas
    cells: list[Cell] = [(method, first, seed) for seed in options.seeds for method in many]
    cells += [(method, alpha, options.seeds[0]) for alpha in others for method in many]
    cells += [(method, first, options.seeds[0]) for method in once]
    study = Study(options, KEYS, setting, page)
    study.measure_missing(cells, lambda cell, deadline: measure(cell, options, data, deadline), summary_of)


def summary_of(done: Record) -> str:
    return f"{100 * done['accuracy']:.1f} %, its teacher {100 * done['teacher']:.1f} % ({done['seconds']:.0f} s)"


def _name(encoder: Any) -> str:
    return encoder if isinstance(encoder, str) else str(encoder["kind"])


if __name__ == "__main__":
    main()
