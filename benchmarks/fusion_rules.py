"""Every fusion rule on the same FAFI uploads, over several partitions, and the centralised bound.

    python benchmarks/fusion_rules.py demo --partitions 1-10 --out results/digits_fusion_rules.json
    python benchmarks/fusion_rules.py fafi --data cifar10 --data-dir data --partitions 6-10 --out results/cifar10_fusion_rules.json
    oneround compare results/digits_fusion_rules.json --rule all --baseline average

Writes a record of the runs, which `oneround compare` reads. Resumes what is in --runs.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from common import parser_of
from oneround.cli.progress import Live
from oneround.config.load import load, parse_override
from oneround.runs.archive import find_runs, keep
from oneround.studies.study import study


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("recipe", nargs="?", default="demo")
    parser.add_argument("--data")
    parser.add_argument("--data-dir")
    parser.add_argument("--partitions", default="1-10", help="first-last, both included")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--runs", type=Path, help="run folders (default: runs/ and the name of --out)")
    parser.add_argument("--out", type=Path, default=Path("results/digits_fusion_rules.json"))
    options = parser.parse_args()
    short = {"data.kind": options.data, "local.data_path": options.data_dir, "training.epochs": options.epochs}
    overrides = [(key, value) for key, value in short.items() if value is not None]
    recipe = load(options.recipe, [*overrides, *(parse_override(text) for text in options.sets)])
    first, _, last = options.partitions.partition("-")
    folder = options.runs or Path("runs") / options.out.stem
    with Live(Console(width=140), every_snapshot=False) as live:
        study(recipe, folder, range(int(first), int(last or first) + 1), resume=True, emit=live.emit)
    keep(find_runs([folder]), options.out)
    print(f"{options.out}: oneround compare {options.out} --rule all")


if __name__ == "__main__":
    main()
