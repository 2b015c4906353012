"""Every fusion rule on the same FAFI uploads, over several partitions, with paired differences.

    python benchmarks/fusion_rules.py demo --partitions 1-10 --out results/digits_fusion_rules
    python benchmarks/fusion_rules.py fafi --data cifar10 --data-dir data --partitions 6-10 --out results/cifar10_fusion_rules

Writes OUT.md (the table) and OUT.json (every value, the recipe, the device). Resumes what is in --runs already.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from rich.console import Console

from oneround.observe.environment import environment
from oneround.observe.progress import Live
from oneround.observe.statistics import paired
from oneround.observe.tables import markdown_table
from oneround.observe.words import duration
from oneround.reading import load, parse_override
from oneround.site import choose_device
from oneround.study import study

BASELINES = ("average", "iffi")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data")
    parser.add_argument("--data-dir")
    parser.add_argument("--partitions", default="1-10", help="first-last, both included")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--runs", type=Path, help="run folders (default: runs/ and the name of --out)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    short = {"data.kind": options.data, "local.data_path": options.data_dir, "training.epochs": options.epochs}
    overrides = [(key, value) for key, value in short.items() if value is not None]
    recipe = load(options.recipe, [*overrides, *(parse_override(text) for text in options.sets)])
    first, _, last = options.partitions.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    folder = options.runs or Path("runs") / options.out.name
    started = time.monotonic()
    with Live(Console(width=140), every_snapshot=False) as live:
        finished = study(recipe, folder, seeds, resume=True, emit=live.emit)
    took = time.monotonic() - started

    rows = finished.rows()
    values = {row.name: row.accuracy.values for row in rows}
    baselines = {
        base: {name: paired(found, values[base]) for name, found in values.items() if name != base}
        for base in BASELINES
        if base in values
    }
    where = environment(choose_device(recipe.local.device))
    command = shlex.join(["python", "benchmarks/fusion_rules.py", *(word for word in sys.argv[1:])])
    settled = json.loads((folder / "study.json").read_text())["recipe"]
    lines = [
        f"# {recipe.method} on {recipe.data.kind}: every fusion rule on the same uploads\n",
        f"Test accuracy in %, mean ± 95 % interval over partitions {options.partitions} ({recipe.partition.label}); differences are",
        "paired partition by partition; n.d.: not distinguishable. The centralised row is one training on all data.\n",
        markdown_table(rows, baselines),
        f"- {settled['training']['epochs']} local epochs, batch {settled['training']['batch_size']}, "
        f"initialisation and training seed {recipe.seeds.initialisation}; partition seeds {options.partitions}",
        f"- device: {where['device']}; torch {where['packages']['torch']}; commit {where['commit']}; {duration(took)} in all",
        *(
            f"- partition {seed}: {remark}"
            for seed, result in zip(seeds, finished.results, strict=True)
            for remark in result.remarks
        ),
        f"- command: `{command}`\n",
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".md").write_text("\n".join(lines))
    study_data = json.loads((folder / "study.json").read_text())
    curves = [{name: dict(curve) for name, curve in result.curves.items()} for result in finished.results]
    record = {**study_data, "curves": curves, "environment": where, "command": command, "seconds": took}
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
