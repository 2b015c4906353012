"""Fifty clients, digits, the small CNN, one epoch each: Flower's simulation engine (Ray) against the in-process simulator.

    python benchmarks/simulation_speed.py --out results/simulation_speed_cpu.json

Both do the same work from the same recipe and end with the same uploads (checked), several turns one after another; seconds and ratios
are medians, with the least and the most. Each is timed as one more run of somebody who tries things out: the simulator is called in a
Python process that has run something before, as in a sweep; Flower's SuperLink is up before the clock starts, then `flwr run` is timed
until it ends. Beside it, cold: `oneround run` as a command, and Flower's time from the server's first line to its last, without the
start of Ray and of its processes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from common import parser_of, write_json
from oneround.config.load import change, load
from oneround.config.recipe import Recipe
from oneround.federate.processes import SuperLink, free_port, write_app
from oneround.runs.environment import environment
from oneround.simulate import run

OURS, COMMAND = "in-process simulator", "in-process simulator, as a command"
FLOWER, SERVED = "Flower simulation engine", "Flower simulation engine, between the server's first and last line"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5, help="each measures everything once, one after another")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()
    overrides = {
        "data.kind": "digits", "model.encoder": "cnn", "partition.kind": "iid", "partition.clients": options.clients,
        "training.epochs": options.epochs, "training.batch_size": 64, "snapshots": 0, "fusion": ["average"], "local.workers": 1,
    }  # fmt: skip
    recipe = load("fafi", overrides.items())
    turns = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run(change(recipe, {"partition.clients": 2}), root / "before")
        for number in range(options.turns):
            turns.append(one_turn(recipe, root / f"turn_{number}"))
            print(f"turn {number + 1}: {json.dumps(turns[-1])}", flush=True)
    ratios = {
        "ratio": (FLOWER, OURS), "ratio_of_commands": (FLOWER, COMMAND), "ratio_without_start_up": (SERVED, OURS)
    }  # fmt: skip
    figures = {
        "clients": options.clients, "epochs": options.epochs, "encoder": "cnn", "data": "digits",
        "seconds": {name: median_and_range([turn[name] for turn in turns]) for name in (OURS, COMMAND, FLOWER, SERVED)},
        **{name: median_and_range([turn[a] / turn[b] for turn in turns]) for name, (a, b) in ratios.items()},
        "same_uploads": all(turn["same_uploads"] for turn in turns), "turns": turns, "load_average_before": load_before,
        "environment": environment(torch.device("cpu")),
    }  # fmt: skip
    print(json.dumps({name: value for name, value in figures.items() if name != "turns"}, indent=1))
    if options.out:
        write_json(options.out, figures)


def one_turn(recipe: Recipe, root: Path) -> dict[str, Any]:
    """Seconds of the simulator, of its command and of Flower's engine, and whether the uploads are the same."""
    root.mkdir()
    (root / "recipe.yaml").write_text(recipe.to_yaml())
    ours = timed(lambda: run(recipe, root / "ours"))
    command = [sys.executable, "-m", "oneround.cli", "run", str(root / "recipe.yaml"), "--out", str(root / "cold")]
    cold = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    clients = recipe.partition.clients
    assert clients is not None
    theirs, served = through_flower(root, clients)
    uploads = [json.loads((root / name / "result.json").read_text())["uploads"] for name in ("ours", "cold", "theirs")]
    same = uploads[0] == uploads[1] == uploads[2]
    return {OURS: ours, COMMAND: cold, FLOWER: theirs, SERVED: served, "same_uploads": same}


def median_and_range(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def timed(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def through_flower(root: Path, clients: int) -> tuple[float, float]:
    """Seconds of `flwr run`, and of it between the server's first and last line."""
    with SuperLink(root / "flower", "127.0.0.1", free_port(), options=("--simulation",)) as link:
        config: dict[str, str | float] = {
            "recipe": str(root / "recipe.yaml"), "out": str(root / "theirs"), "poll": 0.1, "farewell": 0.0,
        }  # fmt: skip
        started = time.monotonic()
        nodes = f"num-supernodes={clients} client-resources-num-cpus=1"
        child = link.run(write_app(root / "app"), config, ["--federation-config", nodes])
        while not child.ended:
            time.sleep(0.1)
        took = time.monotonic() - started
        if not (root / "theirs" / "result.json").exists():
            raise SystemExit(child.read_output() + link.child.read_output())
    lines = (root / "theirs" / "run.log").read_text().splitlines()
    first, last = (datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f") for line in (lines[0], lines[-1]))
    return took, (last - first).total_seconds()


if __name__ == "__main__":
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    main()
