"""FAFI, the feature bank, two stages and the anchor family on the same partitions, with λ traces and gradient angles.

    python benchmarks/anchor_family.py --data cifar10 --data-dir data --out results/cifar10_anchor_family
    python benchmarks/anchor_family.py --data cifar10 --data-dir data --minutes 9      # a part of it; run again to go on
    python benchmarks/anchor_family.py --render results/cifar10_anchor_family.json     # the page again, from the record

The server keeps a tenth of the images in every run, also where the method does not need it, so that all methods see the same
partitions. Several runs share the device (--workers). What is done is not done again: runs are resumed from --runs, and what
OUT.json already holds is kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

from oneround.observe.environment import environment
from oneround.observe.statistics import Summary, paired
from oneround.observe.tables import difference_in_words
from oneround.observe.words import duration
from oneround.site import choose_device

PAIRED: dict[str, tuple[str, dict[str, Any]]] = {
    "fafi (v4)": ("fafi", {}),
    "bank (v5)": ("bank", {}),
    "two-stage 20 % (v6)": ("two-stage", {}),
    "two-stage 10 %": ("two-stage", {"objective.stages.0.share": 0.1}),
    "two-stage 40 %": ("two-stage", {"objective.stages.0.share": 0.4}),
    "etf (v7)": ("etf", {}),
    "etf-entropy (v9)": ("etf-entropy", {}),
    "etf-uncertainty (v10)": ("etf-uncertainty", {}),
}
ONCE: dict[str, tuple[str, dict[str, Any]]] = {
    "etf-attenuated (v12)": ("etf-attenuated", {}),
    "etf-guarded (v13)": ("etf-guarded", {}),
    "etf-hinge (v14)": ("etf-hinge", {}),
    "etf-decaying": ("etf-decaying", {}),
    "etf-equilibrium": ("etf-equilibrium", {}),
    "etf-uncertainty-repaired": ("etf-uncertainty-repaired", {}),
    "etf-decoupled": ("etf-decoupled", {}),
    "etf-annealed (v11)": ("etf-annealed", {}),
    "etf-progressive (v8)": ("etf-progressive", {}),
    "v12 as in its code": ("etf-attenuated", {"alignment.weight.apply": "raw", "alignment.schedule": "cosine"}),
    "bank, label-aware": ("bank", {"objective.terms.bank-contrastive.same_class": "ignored"}),
    "v10 rescaled only": ("etf-uncertainty", {"alignment.weight.rescale": True}),
    "v10 slow σ only": ("etf-uncertainty", {"alignment.weight.rate": 0.01}),
}
METHODS = PAIRED | ONCE
RULES = ["iffi", "average", "logit-ensemble", "entropy-gated", "typicality-gated"]
TRACED = ("base", "align", "lambda_raw", "s", "lambda_effective", "sigma_base", "sigma_align", "entropy")
ANGLES = ("cross-entropy · supervised-contrastive", "bank-contrastive · cross-entropy", "base · alignment")
Cell = tuple[str, int]


def folder_of(runs: Path, cell: Cell) -> Path:
    name = cell[0].replace(" ", "-").replace("(", "").replace(")", "").replace("%", "percent").replace(",", "")
    return runs / f"{name}-{cell[1]}"


def work(cells: Any, runs: Path, overrides: list[tuple[str, Any]]) -> None:
    """One worker: run cells until there are none left."""
    from oneround.data import load_dataset
    from oneround.reading import load
    from oneround.simulate import run

    data = None
    while (cell := cells.get()) is not None:
        preset, changes = METHODS[cell[0]]
        seeds = [(f"seeds.{kind}", cell[1]) for kind in ("partition", "initialisation", "training")]
        snapshots = [("snapshots", 10 if cell[0] in ONCE else 25)]
        recipe = load(preset, [*changes.items(), *seeds, *snapshots, *overrides])
        data = data or load_dataset(recipe.data, recipe.local.data_path)
        started = time.monotonic()
        result = run(recipe, folder_of(runs, cell), data=data, resume=True)
        shown = ", ".join(f"{name} {100 * value:.1f}" for name, value in result.rules.items())
        print(f"{cell[0]}, partition {cell[1]}: {shown} ({time.monotonic() - started:.0f} s)", flush=True)


def collect(runs: Path, cells: list[Cell], commit: str | None) -> list[dict[str, Any]]:
    """What finished runs found, with the commit that found it."""
    from oneround.observe.log import MetricsLog
    from oneround.runs import Result

    found = []
    for cell in cells:
        folder = folder_of(runs, cell)
        if not (folder / "result.json").exists():
            continue
        result = Result.read(folder)
        clients: dict[str, dict[str, list[Any]]] = {}
        for event in MetricsLog(folder / "metrics.jsonl"):
            if event["event"] != "epoch":
                continue
            trace = clients.setdefault(event["client"], {key: [] for key in (*TRACED, "angles")})
            for key in TRACED:
                trace[key].append(_short(event.get(key)))
            if "gradients" in event:
                places = event["gradients"].items()
                angles = {
                    f"{pair} at {place}": _short(what["cosine"][pair])
                    for place, what in places
                    for pair in ANGLES
                    if what["cosine"].get(pair) is not None
                }
                trace["angles"].append([event["epoch"], angles])
        for trace in clients.values():
            for key in [key for key, values in trace.items() if not any(value is not None for value in values)]:
                del trace[key]
        found.append({
            "method": cell[0], "partition": cell[1], "digest": result.partition, "rules": dict(result.rules),
            "clients": dict(result.clients), "curves": {name: dict(curve) for name, curve in result.curves.items()},
            "remarks": list(result.remarks), "trace": clients, "commit": commit,
        })  # fmt: skip
    return found


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def render(record: dict[str, Any]) -> str:
    """The record as a page of Markdown."""
    cells, where = record["cells"], record["environment"]
    methods = [name for name in METHODS if any(cell["method"] == name for cell in cells)]
    lines = [
        f"# The anchor family on {record['data']}\n",
        f"Test accuracy in %, α = {record['alpha']}, {record['epochs']} local epochs, five clients; the server keeps a tenth of the",
        "images in every run. Means ± 95 % interval over the partitions named; differences are paired, partition by partition",
        "(same partition, initial weights and training seed); n.d.: not distinguishable from 0.\n",
    ]
    for rule in ("iffi", "typicality-gated"):
        lines += [
            f"## Fused by {rule}\n",
            "| method | partitions | accuracy | minus fafi (v4) | minus bank (v5) |",
            "|---|---|---|---|---|",
        ]
        for name in methods:
            mine = _by_partition(cells, name, rule)
            found = Summary(tuple(mine.values()))
            margin = f" ± {found.margin:.1f}" if found.margin else ""
            each = f" ({' '.join(f'{value:.1f}' for value in found.values)})" if margin else ""
            row = [name, " ".join(map(str, mine)), f"{found.mean:.1f}{margin}{each}"]
            for base in ("fafi (v4)", "bank (v5)"):
                theirs = _by_partition(cells, base, rule)
                both = [seed for seed in mine if seed in theirs and base != name]
                row.append(
                    difference_in_words(paired([mine[s] for s in both], [theirs[s] for s in both])) if both else ""
                )
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")
    lines += _lambda_tables(cells, methods) + _angle_table(cells, methods)
    commits = ", ".join(sorted({cell.get("commit", where["commit"]) for cell in cells}))
    lines += [
        f"- device: {where['device']}; torch {where['packages']['torch']}; commits {commits}",
        f"- command: `python benchmarks/anchor_family.py {record['arguments']}` ({duration(record['seconds'])} of machine time)",
    ]
    return "\n".join(lines) + "\n"


def _by_partition(cells: list[dict[str, Any]], method: str, rule: str) -> dict[int, float]:
    chosen = [cell for cell in cells if cell["method"] == method]
    return {cell["partition"]: 100 * cell["rules"][rule] for cell in sorted(chosen, key=lambda cell: cell["partition"])}


def _lambda_tables(cells: list[dict[str, Any]], methods: list[str]) -> list[str]:
    """Effective λ per client over training, on the first partition, as the seed documents lay it out."""
    lines = [
        "## Effective λ per client, first partition\n",
        "| method | client | " + " | ".join(f"epoch {e}" for e in (1, 10, 20, 30, 40, 50)) + " |",
        "|---|---|" + "---|" * 6,
    ]
    for name in methods:
        cell = next(cell for cell in cells if cell["method"] == name)
        for client, trace in cell["trace"].items():
            if "lambda_effective" in trace:
                values = [
                    trace["lambda_effective"][e - 1]
                    for e in (1, 10, 20, 30, 40, 50)
                    if e <= len(trace["lambda_effective"])
                ]
                lines.append(f"| {name} | {client} | " + " | ".join(f"{value:.4g}" for value in values) + " |")
    return [*lines, ""]


def _angle_table(cells: list[dict[str, Any]], methods: list[str]) -> list[str]:
    """Cosines between the gradients of terms, averaged over clients and epochs."""
    lines = [
        "## Cosine between gradients, mean over clients and traced epochs (share below 0)\n",
        "| method | pair | cosine |",
        "|---|---|---|",
    ]
    for name in methods:
        gathered: dict[str, list[float]] = {}
        for cell in cells:
            if cell["method"] == name:
                for trace in cell["trace"].values():
                    for _, angles in trace["angles"]:
                        for pair, value in angles.items():
                            gathered.setdefault(pair, []).append(value)
        for pair, values in sorted(gathered.items()):
            below = sum(value < 0 for value in values) / len(values)
            lines.append(f"| {name} | {pair} | {sum(values) / len(values):+.3f} ({below:.0%}) |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument(
        "--partitions",
        type=int,
        nargs="+",
        default=[1, 2, 3],
        help="for the methods that are compared; the others run on the first",
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--workers", type=int, default=3, help="runs that share the device")
    parser.add_argument("--minutes", type=float, default=600, help="stop after so long; what is done is kept")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--runs", type=Path, default=Path("runs/anchor_family"))
    parser.add_argument("--out", type=Path, default=Path("results/cifar10_anchor_family"))
    parser.add_argument("--render", type=Path, metavar="RECORD.json", help="only make the page of a record again")
    options = parser.parse_args()
    if options.render:
        options.render.with_suffix(".md").write_text(render(json.loads(options.render.read_text())))
        return
    from oneround.reading import parse_override

    started = time.monotonic()
    overrides = [
        ("data.kind", options.data), ("local.data_path", options.data_dir), ("partition.alpha", options.alpha),
        ("training.epochs", options.epochs), ("public", 0.1), ("fusion", RULES),
        ("local.checkpoint_seconds", 20.0), *(parse_override(text) for text in options.sets),
    ]  # fmt: skip
    known = (
        json.loads(options.out.with_suffix(".json").read_text()) if options.out.with_suffix(".json").exists() else {}
    )
    kept = {
        (cell["method"], cell["partition"]): {"commit": known["environment"]["commit"], **cell}
        for cell in known.get("cells", [])
    }
    here = environment(choose_device("auto"))
    cells: list[Cell] = [(name, seed) for seed in options.partitions for name in PAIRED if name in options.methods]
    cells += [(name, options.partitions[0]) for name in ONCE if name in options.methods]
    spawn = multiprocessing.get_context("spawn")
    queue: Any = spawn.SimpleQueue()
    for cell in cells:
        if cell not in kept and not (folder_of(options.runs, cell) / "result.json").exists():
            queue.put(cell)
    for _ in range(options.workers):
        queue.put(None)
    workers = [spawn.Process(target=work, args=(queue, options.runs, overrides)) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, 60 * options.minutes - (time.monotonic() - started)))
    for worker in workers:
        worker.kill()
    found = kept | {(cell["method"], cell["partition"]): cell for cell in collect(options.runs, cells, here["commit"])}
    order = [cell for cell in cells if cell in found] + [cell for cell in kept if cell not in cells]
    done, seconds = [found[cell] for cell in order], known.get("seconds", 0.0) + time.monotonic() - started
    record = {
        "data": options.data, "alpha": options.alpha, "epochs": options.epochs, "cells": done, "seconds": seconds,
        "environment": here,
        "arguments": " ".join([f"--data {options.data}", *(f"--set {text}" for text in options.sets)]),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(record, ensure_ascii=False) + "\n")
    options.out.with_suffix(".md").write_text(render(record))
    print(f"{len(done)} of {len(cells)} runs are done; {options.out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
