"""Every fusion rule on the same FAFI uploads, over several partitions, with paired differences.

    python benchmarks/fusion_rules.py demo --partitions 1-10 --out results/digits_fusion_rules
    python benchmarks/fusion_rules.py fafi --data cifar10 --data-dir data --partitions 6-10 --out results/cifar10_fusion_rules
    python benchmarks/fusion_rules.py --render results/cifar10_fusion_rules.json      # the table again, from the record

Writes OUT.json (every value, the recipe, the device) and OUT.md (the table, made from it). Resumes what is in --runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from oneround.observe.environment import environment
from oneround.observe.progress import Live
from oneround.observe.statistics import paired
from oneround.observe.tables import markdown_table
from oneround.observe.words import duration
from oneround.parts import slot
from oneround.reading import load, parse_override
from oneround.site import choose_device
from oneround.study import accuracies, study, table_rows

BASELINES = ("average", "iffi")


def render(record: dict[str, Any]) -> str:
    """The record as a page of Markdown."""
    recipe, seeds, where = record["recipe"], record["partitions"], record["environment"]
    values = accuracies(record)
    rows = table_rows(values, "average")
    baselines = {
        base: {name: paired(found, values[base]) for name, found in values.items() if name != base}
        for base in BASELINES
        if base in values
    }
    partition = slot("partition").parse(recipe["partition"]).label
    training = recipe["training"]
    lines = [
        f"# {recipe['method']} on {recipe['data']['kind']}: every fusion rule on the same uploads\n",
        f"Test accuracy in %, mean ± 95 % interval over {len(seeds)} partitions ({partition}); differences are paired",
        "partition by partition; n.d.: not distinguishable from 0. The centralised row is one training on all data.\n",
        markdown_table(rows, baselines),
        f"- {training['epochs']} local epochs, batch {training['batch_size']}; partition seeds {seeds[0]}–{seeds[-1]}, "
        f"initialisation and training seed {recipe['seeds']['initialisation']}",
        f"- device: {where['device']}; torch {where['packages']['torch']}; commit {where['commit']}; {duration(record['seconds'])} in all",
        *(
            f"- partition {seed}: {remark}"
            for seed, remarks in zip(seeds, record["remarks"], strict=True)
            for remark in remarks
        ),
        f"- command: `python benchmarks/fusion_rules.py {record['arguments']}`",
    ]
    return "\n".join(lines) + "\n"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    short = {"data.kind": options.data, "local.data_path": options.data_dir, "training.epochs": options.epochs}
    overrides = [(key, value) for key, value in short.items() if value is not None]
    recipe = load(options.recipe, [*overrides, *(parse_override(text) for text in options.sets)])
    first, _, last = options.partitions.partition("-")
    folder = options.runs or Path("runs") / options.out.name
    started = time.monotonic()
    with Live(Console(width=140), every_snapshot=False) as live:
        finished = study(recipe, folder, range(int(first), int(last or first) + 1), resume=True, emit=live.emit)
    words = [options.recipe, *(["--data", options.data] if options.data else []), "--partitions", options.partitions]
    words += ["--epochs", str(options.epochs)] if options.epochs else []
    words += [f"--set {text}" for text in options.sets]
    return {
        **json.loads((folder / "study.json").read_text()),
        "curves": [{name: dict(curve) for name, curve in result.curves.items()} for result in finished.results],
        "environment": environment(choose_device(recipe.local.device)),
        "arguments": " ".join(words),
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="demo")
    parser.add_argument("--data")
    parser.add_argument("--data-dir")
    parser.add_argument("--partitions", default="1-10", help="first-last, both included")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--runs", type=Path, help="run folders (default: runs/ and the name of --out)")
    parser.add_argument("--out", type=Path, default=Path("results/digits_fusion_rules"))
    parser.add_argument("--render", type=Path, metavar="RECORD.json", help="only make the table of a record again")
    options = parser.parse_args()
    if options.render:
        options.render.with_suffix(".md").write_text(render(json.loads(options.render.read_text())))
        return
    record = measure(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    options.out.with_suffix(".md").write_text(render(record))
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
