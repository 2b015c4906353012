"""Experts routed by the ridge, against the ridge, IFFI and the typicality gate, on the same uploads and partitions.

    python benchmarks/routed.py --data cifar10 --data-dir data --minutes 9        # a part of it; run again to go on
    python benchmarks/routed.py --alphas 0.05 --experts fafi --partitions 1 2 3 4 5
    python benchmarks/routed.py --render results/cifar10_routed.json              # the page again, from the record

Experts are trained by FAFI, by FAFI with entropy-weighted anchors, and by cross-entropy alone; every snapshot (each tenth of the
training) is scored, because better-fitted clients are not always better uploads. Temperature, trust, β and η are chosen on a
tenth of every client's images that is held back from training. Finished cells are not repeated: runs are resumed from --runs,
and OUT.json keeps its cells.
"""

from __future__ import annotations

import argparse
import statistics

from common import markdown_head, markdown_row
from oneround.analysis.statistics import paired
from oneround.analysis.terminal import format_difference
from oneround.config.load import load, parse_override
from oneround.errors import OutOfTime
from oneround.runs.result import Result
from oneround.simulate import run
from study import Cell, Record, Study, arguments, format_mean, only_pages

EXPERTS = {"fafi": "routed", "entropy-λ": "routed-entropy", "cross-entropy": "routed-ce"}
ROUTED = ("routed", "routed posterior=typicality")
KEYS = ("alpha", "experts", "partition")
ALONE = ("ridge", "iffi", "typicality-gated")
COMPARED = (*ROUTED, "iffi", "typicality-gated")
"""Rules that depend on how experts were trained."""


def measure(cell: Cell, options: argparse.Namespace, deadline: float) -> Record | None:
    """One run, or None if the time is over before it is finished."""
    alpha, experts, seed = cell
    seeds = [(f"seeds.{kind}", seed) for kind in ("partition", "initialisation", "training")]
    overrides = [
        ("data.kind", options.data), ("local.data_path", options.data_dir), ("partition.alpha", alpha),
        ("training.epochs", options.epochs), ("snapshots", max(1, options.epochs // 5)), ("local.checkpoint_seconds", 20.0),
    ]  # fmt: skip
    recipe = load(EXPERTS[experts], [*overrides, *seeds, *(parse_override(text) for text in options.sets)])
    folder = options.runs / f"{options.data}-{experts}-{alpha}-{seed}"
    try:
        result = run(recipe, folder, resume=True, deadline=deadline)
    except OutOfTime:
        return None
    return {
        "digest": result.partition, "rules": dict(result.rules),
        "clients": dict(result.clients), "curves": {name: dict(curve) for name, curve in result.curves.items()},
        "validation": {name: dict(curve) for name, curve in result.validation.items()},
        "chosen": _chosen(result), "remarks": list(result.remarks),
    }  # fmt: skip


def _chosen(result: Result) -> dict[str, float]:
    """Test accuracy of every rule at the snapshot that is best on validation images."""
    return {rule: result.curves[rule][epoch] for rule, epoch in result.chosen.items()}


def page(record: Record) -> list[str]:
    cells = record["cells"]
    lines = [
        f"# Experts routed by the ridge, on {record['data']}\n",
        f"Test accuracy in % after {record['epochs']} local epochs, five clients, mean ± 95 % interval (each partition); differences are",
        "paired, partition by partition, on the same uploads. A tenth of every client's images is held back to choose T, trust, β and η.\n",
    ]
    for alpha in sorted({cell["alpha"] for cell in cells}):
        for experts in dict.fromkeys(cell["experts"] for cell in cells if cell["alpha"] == alpha):
            mine = [cell for cell in cells if (cell["alpha"], cell["experts"]) == (alpha, experts)]
            seeds = ", ".join(str(cell["partition"]) for cell in mine)
            lines += [f"## α = {alpha}, experts: {experts}, partitions {seeds}\n", *_table(mine), ""]
    lines += ["## Experts trained in other ways, minus FAFI's on the same partitions\n", *_ways(cells), ""]
    lines += ["## How long experts train: mean accuracy by local epochs\n", *_lengths(cells), ""]
    return lines


def _ways(cells: list[Record]) -> list[str]:
    """Every other kind of expert against FAFI's, rule by rule."""
    by_cell = {tuple(cell[key] for key in KEYS): cell for cell in cells}
    lines = markdown_head(["α", "experts", "partitions", *COMPARED])
    for alpha, experts in dict.fromkeys(
        (cell["alpha"], cell["experts"]) for cell in cells if cell["experts"] != "fafi"
    ):
        seeds = [each for a, e, each in by_cell if (a, e) == (alpha, experts) and (alpha, "fafi", each) in by_cell]
        if not seeds:
            continue
        row = [f"{alpha}", experts, ", ".join(map(str, seeds))]
        for rule in COMPARED:
            ours, theirs = (
                [100 * by_cell[alpha, kind, seed]["rules"][rule] for seed in seeds] for kind in (experts, "fafi")
            )
            row.append(format_difference(paired(ours, theirs)))
        lines.append(markdown_row(row))
    return lines


def _lengths(cells: list[Record]) -> list[str]:
    epochs = sorted({int(epoch) for cell in cells for epoch in cell["curves"][COMPARED[0]]})
    lines = markdown_head(["α", "experts", "rule", *map(str, epochs)])
    for alpha, experts in sorted({(cell["alpha"], cell["experts"]) for cell in cells}):
        mine = [cell for cell in cells if (cell["alpha"], cell["experts"]) == (alpha, experts)]
        for rule in COMPARED:
            curves = [{int(at): value for at, value in cell["curves"][rule].items()} for cell in mine]
            means = [f"{100 * statistics.mean(curve[epoch] for curve in curves):.1f}" for epoch in epochs]
            lines.append(markdown_row([f"{alpha}", experts, rule, *means]))
    return lines


def _table(cells: list[Record]) -> list[str]:
    against = [f"minus {rule}" for rule in ALONE]
    lines = markdown_head(["rule", "accuracy", "at the snapshot validation chose", *against])
    for rule in (*ROUTED, *ALONE):
        values = [100 * cell["rules"][rule] for cell in cells]
        row = [rule, format_mean(values), format_mean([100 * cell["chosen"][rule] for cell in cells])]
        for base in ALONE:
            theirs = [100 * cell["rules"][base] for cell in cells]
            row.append(format_difference(paired(values, theirs)) if base != rule and len(values) > 1 else "")
        lines.append(markdown_row(row))
    return lines


def main() -> None:
    parser = arguments(__doc__, "routed")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.05, 0.1, 0.5])
    parser.add_argument("--experts", nargs="+", choices=EXPERTS, default=list(EXPERTS), metavar="NAME")
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--epochs", type=int, default=50)
    options = parser.parse_args()
    if only_pages(options, KEYS, page):
        return
    cells = [(a, e, s) for e in options.experts for a in options.alphas for s in options.partitions]
    study = Study(options, KEYS, {"data": options.data, "epochs": options.epochs}, page)
    study.measure_missing(cells, lambda cell, deadline: measure(cell, options, deadline), summary_of)


def summary_of(done: Record) -> str:
    return ", ".join(f"{name} {100 * value:.1f}" for name, value in done["rules"].items())


if __name__ == "__main__":
    main()
