"""How long commands take before they do their work, against `import torch`, and against another version of the package.

    python benchmarks/startup.py --turns 5 --other ../older/src --out results/startup_cpu.json

`methods`: seconds of `oneround methods` over those of `python -c "import torch"`. `first step`: seconds from the start of
`oneround run fafi --data digits --epochs 1` to the first training step of any client, over those of the other version. Every
turn measures each once, one after the other, so that a noisy machine disturbs all alike; medians are compared. The first step is
taken from the run's folder: when a client's upload was written, less the seconds its epoch took.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from common import parser_of, write_json
from oneround.protocol import blob
from oneround.runs.environment import environment
from oneround.site import choose_device


def seconds(command: list[str], source: Path | None = None) -> float:
    """Wall-clock seconds of a command that uses the package in `source`."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_environment(source))
    return time.perf_counter() - started


def first_step(source: Path | None = None) -> float:
    """Seconds from the start of the command to the first training step."""
    with TemporaryDirectory() as folder:
        words = ["run", "fafi", "--data", "digits", "--epochs", "1", "--device", "cpu", "--out", f"{folder}/run"]
        started = time.time()
        subprocess.run(
            [sys.executable, "-m", "oneround.cli", *words],
            check=True,
            stdout=subprocess.DEVNULL,
            env=_environment(source),
        )
        uploads = Path(folder, "run", "uploads").glob("*.safetensors")
        return min(path.stat().st_mtime - _epoch_seconds(path) for path in uploads) - started


def _epoch_seconds(path: Path) -> float:
    return float(blob.peek(path, "upload")["history"][0]["seconds"])


def _environment(source: Path | None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(source)} if source else dict(os.environ)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--other", type=Path, help="src folder of another version, measured beside this one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    methods = [sys.executable, "-m", "oneround.cli", "methods"]
    times: dict[str, list[float]] = {}
    for _ in range(options.turns):
        turn = {"import torch": seconds([sys.executable, "-c", "import torch"]), "methods": seconds(methods)}
        turn["first step"] = first_step()
        if options.other:
            turn["methods, other"] = seconds(methods, options.other)
            turn["first step, other"] = first_step(options.other)
        for name, value in turn.items():
            times.setdefault(name, []).append(value)
        print(", ".join(f"{name} {value:.2f} s" for name, value in turn.items()), flush=True)
    median = {name: statistics.median(values) for name, values in times.items()}
    ratios = {"methods over import torch": median["methods"] / median["import torch"]}
    if options.other:
        ratios["methods over import torch, other"] = median["methods, other"] / median["import torch"]
        ratios["first step over other"] = median["first step"] / median["first step, other"]
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")
    if options.out:
        record = {
            "seconds": times,
            "ratios": ratios,
            "environment": environment(choose_device("cpu")),
            "load": os.getloadavg(),
        }
        write_json(options.out, record)


if __name__ == "__main__":
    main()
