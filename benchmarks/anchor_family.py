"""FAFI, the feature bank, two stages and the anchor family on the same partitions, with λ traces and gradient angles.

    python benchmarks/anchor_family.py --data cifar10 --data-dir data --out results/cifar10_anchor_family.json
    python benchmarks/anchor_family.py --data cifar10 --data-dir data --minutes 9      # a part of it; run again to go on
    oneround compare results/cifar10_anchor_family.json --common --method v4 --method v5 --method v6

The server keeps a tenth of the images in every run, also where the method does not need it, so that all methods see the same
partitions. Several runs share the device (--workers). Finished cells are not repeated: runs are
resumed from --runs, and the record --out keeps its runs. `oneround compare` reads the record.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import parser_of
from oneround.config.load import load, parse_override
from oneround.config.recipe import Recipe
from oneround.runs.archive import find_runs, keep
from oneround.runs.record import keys_of

PAIRED: dict[str, tuple[str, dict[str, Any]]] = {
    "fafi (v4)": ("fafi", {}),
    "bank (v5)": ("bank", {}),
    "two-stage 20 % (v6)": ("two-stage", {}),
    "two-stage 10 %": ("two-stage", {"objective.stages.0.share": 0.1}),
    "two-stage 40 %": ("two-stage", {"objective.stages.0.share": 0.4}),
    "etf (v7)": ("etf", {}),
    "etf-entropy (v9)": ("etf-entropy", {}),
    "etf-uncertainty (v10)": ("etf-uncertainty", {}),
    "v10, σ not clipped": ("etf-uncertainty-unclipped", {}),
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
    "v10 slow σ only": ("etf-uncertainty-slow", {}),
    "v10 head start only": ("etf-uncertainty-head-start", {}),
}
METHODS = PAIRED | ONCE
RULES = ["iffi", "average", "logit-ensemble", "entropy-gated", "typicality-gated"]
Cell = tuple[str, int]


def folder_of(runs: Path, cell: Cell) -> Path:
    name = cell[0].replace(" ", "-").replace("(", "").replace(")", "").replace("%", "percent").replace(",", "")
    return runs / f"{name}-{cell[1]}"


def recipe_of(cell: Cell, overrides: list[tuple[str, Any]]) -> Recipe:
    preset, changes = METHODS[cell[0]]
    seeds = [(f"seeds.{kind}", cell[1]) for kind in ("partition", "initialisation", "training")]
    snapshots = [("snapshots", 10 if cell[0] in ONCE else 25)]
    return load(preset, [*changes.items(), *seeds, *snapshots, *overrides])


def identity(keys: Mapping[str, Any]) -> str:
    """Identifies the cell of a run: all keys but those that follow from the data or only observe."""
    ignored = ("model.", "training.augment.flip", "trace.", "safeguards.", "validation", "evaluation.")
    return json.dumps({key: value for key, value in sorted(keys.items()) if not key.startswith(ignored)})


def work(cells: Any, runs: Path, overrides: list[tuple[str, Any]]) -> None:
    """One worker: run cells until there are none left."""
    from oneround.data import load_dataset
    from oneround.simulate import run

    data = None
    while (cell := cells.get()) is not None:
        recipe = recipe_of(cell, overrides)
        data = data or load_dataset(recipe.data, recipe.local.data_path)
        started = time.monotonic()
        result = run(recipe, folder_of(runs, cell), data=data, resume=True)
        accuracies = ", ".join(f"{name} {100 * value:.1f}" for name, value in result.rules.items())
        print(f"{cell[0]}, partition {cell[1]}: {accuracies} ({time.monotonic() - started:.0f} s)", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
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
    parser.add_argument("--out", type=Path, default=Path("results/cifar10_anchor_family.json"))
    options = parser.parse_args()
    started = time.monotonic()
    overrides = [
        ("data.kind", options.data), ("local.data_path", options.data_dir), ("partition.alpha", options.alpha),
        ("training.epochs", options.epochs), ("public", 0.1), ("fusion", RULES),
        ("local.checkpoint_seconds", 20.0), *(parse_override(text) for text in options.sets),
    ]  # fmt: skip
    recorded = find_runs([options.out]) if options.out.exists() else []
    done = {identity(run.keys) for run in recorded}
    cells: list[Cell] = [(name, seed) for seed in options.partitions for name in PAIRED if name in options.methods]
    cells += [(name, options.partitions[0]) for name in ONCE if name in options.methods]
    spawn = multiprocessing.get_context("spawn")
    queue: Any = spawn.SimpleQueue()
    for cell in cells:
        if identity(keys_of(recipe_of(cell, overrides).plain())) not in done:
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
    records = {
        identity(run.keys): run
        for run in (*recorded, *(find_runs([options.runs]) if any(options.runs.glob("*/result.json")) else []))
    }
    keep(list(records.values()), options.out)
    print(
        f"{len(records)} runs are in the record, {len(cells)} were asked for; oneround compare {options.out} --common"
    )


if __name__ == "__main__":
    main()
