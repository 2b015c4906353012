"""Fifty clients, digits, the small CNN, one epoch each: Flower's simulation engine (Ray) against the in-process simulator.

    python benchmarks/simulation_speed.py --out results/simulation_speed_cpu.json

Both do the same work from the same recipe, end with the same uploads (checked), and are timed from start to result, each in a
process of its own. Flower's time is also given without the start of its SuperLink and of Ray, counted from the server's first line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import torch

from oneround.federate.processes import SuperLink, free_port, write_app
from oneround.observe.environment import environment
from oneround.reading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    given = {
        "data.kind": "digits", "model.encoder": "cnn", "partition.kind": "iid", "partition.clients": options.clients,
        "training.epochs": options.epochs, "training.batch_size": 64, "snapshots": 0, "fusion": ["average"],
    }  # fmt: skip
    recipe = load("fafi", given.items())
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "recipe.yaml").write_text(recipe.to_yaml())
        ours = simulated(place)
        theirs, served = through_flower(place, options.clients)
        uploads = [json.loads((place / name / "result.json").read_text())["uploads"] for name in ("ours", "theirs")]
    figures = {
        "clients": options.clients, "epochs": options.epochs, "encoder": "cnn", "data": "digits",
        "seconds": {"in-process simulator": ours, "Flower simulation engine": theirs, "of which after start-up": served},
        "ratio": theirs / ours, "ratio_without_start_up": served / ours, "same_uploads": uploads[0] == uploads[1],
        "environment": environment(torch.device("cpu")),
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def simulated(place: Path) -> float:
    started = time.monotonic()
    command = [sys.executable, "-m", "oneround.cli", "run", str(place / "recipe.yaml"), "--out", str(place / "ours")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def through_flower(place: Path, clients: int) -> tuple[float, float]:
    """Seconds from the start of the SuperLink to the result, and from the server's first line."""
    started = time.monotonic()
    link = SuperLink(place / "flower", "127.0.0.1", free_port(), options=("--simulation",)).start()
    try:
        config: dict[str, str | float] = {
            "recipe": str(place / "recipe.yaml"), "out": str(place / "theirs"), "poll": 0.1, "farewell": 0.0,
        }  # fmt: skip
        nodes = f"num-supernodes={clients} client-resources-num-cpus=1"
        run = link.run(write_app(place / "app"), config, ["--federation-config", nodes])
        while not run.ended:
            time.sleep(0.1)
        took = time.monotonic() - started
        if not (place / "theirs" / "result.json").exists():
            raise SystemExit(run.said() + link.child.said())
    finally:
        link.stop()
    lines = (place / "theirs" / "run.log").read_text().splitlines()
    first, last = (datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f") for line in (lines[0], lines[-1]))
    return took, (last - first).total_seconds()


if __name__ == "__main__":
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    main()
