"""Students of one teacher: how often one network, taught on public images, noise or inversions, answers as the ensemble does.

    python benchmarks/students.py --out results/digits_students

FAFI is trained on digits at α = 0.5, one partition after another; the typicality-gated ensemble of its uploads is the teacher of
every student, and each student takes about as many steps. Agreement: the share of held-out digits on which both give the same
answer, right or wrong.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from common import markdown_row, parser_of, write_json
from oneround import acts
from oneround.config.load import load
from oneround.data import load_dataset
from oneround.fusion import rules
from oneround.runs.environment import environment
from oneround.runs.folder import RunFolder
from oneround.server.plan import DealtPlan
from oneround.simulate import run
from oneround.site import choose_device
from study import measured_on, sibling

TEACHER = "typicality-gated"
OVERRIDES = {
    "data": "digits", "partition.alpha": 0.5, "public": 0.2, "model.encoder": "cnn", "training.epochs": 20, "training.batch_size": 64,
    "training.augment.crop_scale": [0.6, 1.0], "fusion": [TEACHER], "snapshots": 0, "trace.every": 0, "local.workers": 1,
}  # fmt: skip
TAUGHT = {"epochs": 30, "batch_size": 64, "temperature": 0.25}  # chosen on partitions 4 and 5
STUDENTS = {
    "public images": {"images": "public", "mixes": 1500, **TAUGHT},
    "noise": {"images": "noise", "made_up": 1788, **TAUGHT},
    "inversions": {"images": "inversions", "made_up": 1788, **TAUGHT},
}
Measured = dict[str, dict[str, float]]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--partitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started, seeds = time.monotonic(), list(range(1, options.partitions + 1))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        measured = list(pool.map(measure, seeds))
    figures = {
        "settings": {**OVERRIDES, "preset": "fafi", "teacher": TEACHER, "students": STUDENTS},
        "partition_seeds": seeds, "other_seeds": load("fafi").seeds.model_dump(exclude={"partition"}),
        "measured": measured, "environment": environment(choose_device("cpu")), "seconds": time.monotonic() - started,
    }  # fmt: skip
    print(table(figures))
    if options.out:
        write_json(sibling(options.out, ".json"), figures)
        sibling(options.out, ".md").write_text(table(figures) + "\n")


def measure(seed: int) -> Measured:
    """Accuracy of teacher and students on one partition, and how often each student agrees."""
    recipe = load("fafi", (OVERRIDES | {"seeds.partition": seed}).items())
    data = load_dataset(recipe.data)
    with tempfile.TemporaryDirectory() as folder:
        run(recipe, Path(folder) / "run", data=data)
        uploads, server = RunFolder(Path(folder) / "run").uploads(), DealtPlan.of(recipe, data).server()
        fusion_rules = {"teacher": rules.parse(TEACHER)} | {
            name: rules.parse({"kind": "distilled", "teacher": TEACHER, **settings})
            for name, settings in STUDENTS.items()
        }
        models = {name: acts.fuse(uploads, uploads.broadcast, server, rule) for name, rule in fusion_rules.items()}
        answers = {name: model.predict(data.test.pixels).argmax(1) for name, model in models.items()}
    return {
        name: {
            "accuracy": float((mine == data.test.labels).float().mean()),
            "agreement": float((mine == answers["teacher"]).float().mean()),
        }
        for name, mine in answers.items()
    }


def table(figures: dict[str, object]) -> str:
    """Means over partitions, and each of them."""
    measured, machine = figures["measured"], figures["environment"]
    lines = [
        f"FAFI on digits, α = {OVERRIDES['partition.alpha']}, {OVERRIDES['training.epochs']} epochs, partitions {figures['partition_seeds']}; "
        f"students of the {TEACHER} ensemble; "
        f"{measured_on(machine, [machine['commit']])}; {figures['seconds']:.0f} s",
        "",
        "| answers by | accuracy % | each partition | gives the teacher's answer % | each partition |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in measured[0]:
        cells = []
        for key in ("accuracy", "agreement"):
            values = [100 * one[name][key] for one in measured]
            cells += [f"{statistics.mean(values):.1f}", " ".join(f"{value:.1f}" for value in values)]
        label = name if name == "teacher" else f"student taught on {name}"
        lines.append(markdown_row([label, *(cells if name != "teacher" else [*cells[:2], "", ""])]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
