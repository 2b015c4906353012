"""What the gradient trace costs: training time with it over training time without, in turns on the same machine.

    python benchmarks/trace_cost.py                                                     # digits, the demo's network
    python benchmarks/trace_cost.py --data cifar10 --data-dir data --model resnet18 --batch-size 512 --epochs 6   # on a GPU

Prints the median over turns of the ratio of summed epoch times (the first epoch of each left out), and its range.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch

from common import parser_of, write_json
from oneround import acts
from oneround.config.load import load
from oneround.data import load_dataset
from oneround.runs.environment import environment
from oneround.server.plan import DealtPlan
from oneround.site import Site


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", default="v12")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=10_000, help="of the client that trains")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    overrides = {
        "data.kind": options.data, "local.data_path": options.data_dir, "model.encoder.kind": options.model, "fusion": ["iffi"],
        "training.batch_size": options.batch_size, "training.epochs": options.epochs,
    }  # fmt: skip
    recipe = load(options.preset, overrides.items())
    data = load_dataset(recipe.data, recipe.local.data_path)
    mine = data.train.take(torch.arange(min(options.samples, len(data.train))))
    sent = {
        every: DealtPlan.of(load(options.preset, {**overrides, "trace.every": every}.items()), data).prepare()
        for every in (0, recipe.trace.every)
    }

    def seconds(every: int) -> float:
        history = acts.train(sent[every], Site("site", mine, local=recipe.local)).history
        return sum(entry["seconds"] for entry in history[1:])

    seconds(0)  # warm up
    ratios = sorted(seconds(recipe.trace.every) / seconds(0) for _ in range(options.turns))
    figures = {
        "preset": options.preset, "data": options.data, "model": options.model, "batch_size": options.batch_size, "samples": len(mine),
        "trace_every_steps": recipe.trace.every, "median_ratio": statistics.median(ratios), "range": [ratios[0], ratios[-1]],
        "turns": options.turns, "environment": environment(Site("", local=recipe.local).device),
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if options.out:
        write_json(options.out, figures)


if __name__ == "__main__":
    main()
