"""From 5 to 1,000 clients with the same data in all: seconds of every part of a run, peak memory, bytes on disk, and what they grow by.

    python benchmarks/scaling.py --data-dir DATA --out results/scaling_cpu
    python benchmarks/scaling.py --data-dir DATA --clients 10 100 1000 --batched      # nobody trains together

Fashion-MNIST is dealt out evenly to ever more clients, who train the small CNN in steps of 60 images: 1,000 steps per epoch, however
many clients share them. What grows is then the cost of having clients. Every count is a process of its own, which first makes a run
of two clients that is not counted: it loads libraries and kernels. One client trains at a time, on a CPU with one thread; on a GPU
the counts of `--batched` are measured a second time with clients trained together. Run again, it goes on with what is missing.

training: broadcast, the clients' images and their steps. uploads: packed, written and flushed; where threads do that beside training,
what is left to wait for (the record has the threads' own seconds). scoring: every rule and every client's own network on the test
images. fusion: what the rules make of the uploads. record: log, result, model and pictures. rest: recipe, initial weights, checks.
Memory is the process's peak; the device's is what PyTorch allocated. On a CPU the phases are in seconds of its processor, which other
programs hardly prolong.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common import in_own_process, markdown_head, markdown_row
from study import Cell, Record, Study, arguments, only_pages

KEYS = ("clients", "way")
ALONE, TOGETHER = "one by one", "together"
PHASES = ("partition", "training", "uploads", "scoring", "fusion", "record", "rest")


class Clock:
    """Seconds in each phase of a run; a phase within another one counts for itself only."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.cpu_seconds = dict.fromkeys(PHASES, 0.0)
        """Of this process, which do not depend on what else the machine does."""
        self.beside = dict.fromkeys(PHASES, 0.0)
        """Seconds of calls in other threads, while this one waits or does something else."""
        self._thread = threading.get_ident()
        self._phases = ["rest"]
        self._since = time.perf_counter(), time.process_time()

    def _switch(self) -> None:
        now, phase = (time.perf_counter(), time.process_time()), self._phases[-1]
        self.seconds[phase] += now[0] - self._since[0]
        self.cpu_seconds[phase] += now[1] - self._since[1]
        self._since = now

    def count(self, owner: Any, name: str, phase: str) -> None:
        """Count every call of this function or method to a phase, from now on."""
        function: Callable[..., Any] = getattr(owner, name)

        def counted(*values: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread:
                started = time.perf_counter()
                try:
                    return function(*values, **options)
                finally:
                    self.beside[phase] += time.perf_counter() - started
            self._switch()
            self._phases.append(phase)
            try:
                return function(*values, **options)
            finally:
                self._switch()
                self._phases.pop()

        setattr(owner, name, counted)

    def stop(self) -> dict[str, dict[str, float]]:
        self._switch()
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "seconds_beside": self.beside}


def measure_one(clients: int, way: str, options: argparse.Namespace) -> Record:
    """One run in this process: seconds of its phases, peaks of memory, bytes of its folder."""
    import torch

    from oneround import acts
    from oneround.config.load import change, load, parse_override
    from oneround.data import load_dataset
    from oneround.files import BackgroundFlush
    from oneround.protocol import Broadcast, Upload
    from oneround.runs import pictures
    from oneround.runs.writer import RunWriter
    from oneround.server import loop, plan
    from oneround.simulate import run
    from oneround.simulate.simulation import SimulatedClients
    from oneround.site import choose_device

    recipe = load("fafi", [
        ("data.kind", options.data), ("local.data_path", options.data_dir), ("model.encoder", "cnn"),
        ("partition.kind", "iid"), ("partition.clients", clients), ("training.epochs", options.epochs),
        ("training.batch_size", options.batch_size), ("snapshots", 0), ("fusion", ["average", "iffi"]),
        ("local.device", options.device), ("local.workers", 1), ("local.batched", way == TOGETHER),
        *(parse_override(text) for text in options.sets),
    ])  # fmt: skip
    loaded = load_dataset(recipe.data, options.data_dir)
    train, test = (images.take(torch.arange(min(len(images), size))) for images, size in (
        (loaded.train, options.samples), (loaded.test, options.test_images)
    ))  # fmt: skip
    data = replace(loaded, train=train, test=test)
    folder = options.runs / f"{clients}_{way.replace(' ', '_')}"
    for path in (folder, folder / "before"):
        shutil.rmtree(path, ignore_errors=True)
    before = replace(data, train=train.take(torch.arange(min(len(train), 2 * options.batch_size))))
    run(change(recipe, {"partition.clients": 2}), folder / "before", data=before)
    cuda = choose_device(options.device).type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    peak_before, clock = host_peak(), Clock()
    clock.count(plan, "deal", "partition")
    clock.count(SimulatedClients, "collect", "training")
    clock.count(Upload, "write", "uploads")
    clock.count(BackgroundFlush, "__exit__", "uploads")
    clock.count(loop, "score_uploads", "scoring")
    for rule in {type(rule) for rule in acts.rules_of(recipe)}:
        for name in ("fuse", "ready"):
            if hasattr(rule, name):
                clock.count(rule, name, "fusion")
    clock.count(RunWriter, "snapshot", "record")
    clock.count(RunWriter, "finish", "record")
    clock.count(pictures, "draw_partition", "record")
    result = run(recipe, folder / "run", data=data)
    spent = clock.stop()
    weights = Broadcast.read(folder / "run" / "broadcast.safetensors").weights
    events = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    done: Record = {
        **spent, "peak_before": peak_before, "host_peak": host_peak(),
        "device_peak": torch.cuda.max_memory_allocated() if cuda else None,
        "bytes": {entry.name: bytes_of(entry) for entry in sorted((folder / "run").iterdir())},
        "network": sum(tensor.numel() * tensor.element_size() for tensor in weights.values()),
        "steps": sum(event["steps"] for event in events if event["event"] == "epoch"), "accuracy": result.rules["average"],
    }  # fmt: skip
    shutil.rmtree(folder)
    return done


def host_peak() -> int:
    """The most memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bytes_of(path: Path) -> int:
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
    )


def line_through(clients: list[int], values: list[float]) -> tuple[float, float, float]:
    """Least squares of values against numbers of clients: at no client, per client, and the share of variance explained."""
    slope, start = np.polyfit(clients, values, 1)
    errors, apart = np.asarray(values) - (start + slope * np.asarray(clients)), np.asarray(values) - np.mean(values)
    return float(start), float(slope), float(1 - errors @ errors / (apart @ apart)) if apart.any() else 1.0


def unit_of(cells: list[Record]) -> str:
    """The seconds that tell more: those of the clock on a GPU, elsewhere those of the processor, which other programs do not prolong."""
    return "cpu_seconds" if any(cell["device_peak"] is None for cell in cells) else "seconds"


def growth(cells: list[Record], way: str) -> list[str]:
    """What each part of a run grows by per client, and peak memory with the fewest and the most clients."""
    rows = [cell for cell in cells if cell["way"] == way]
    if len(rows) < 3:
        return []
    unit, clients = unit_of(cells), [cell["clients"] for cell in rows]
    sizes = [
        ("disk, MB", lambda cell: sum(cell["bytes"].values()) / 1e6),
        ("host memory, MB", lambda cell: cell["host_peak"] / 1e6),
    ]
    if unit == "seconds":
        sizes.append(("device memory, MB", lambda cell: cell["device_peak"] / 1e6))
    times = [(f"{name}, s", lambda cell, name=name: cell[unit][name]) for name in PHASES]
    times.append(("total, s", lambda cell: sum(cell[unit].values())))
    lines = ["", *markdown_head([f"growth, trained {way}", "constant", "per 1,000 clients", "R²"])]
    for name, value in [*times, *sizes]:
        start, slope, explained = line_through(clients, [value(cell) for cell in rows])
        shown = (round(start, 2) + 0.0, round(1000 * slope, 2) + 0.0)  # no minus before a zero
        lines.append(markdown_row([name, *(f"{value:.2f}" for value in shown), f"{explained:.3f}"]))
    few, many = (choose(rows, key=lambda cell: cell["clients"]) for choose in (min, max))
    added, network = many["clients"] - few["clients"], few["network"]
    lines.append("")
    for memory in ("host", "device"):
        before, after = (cell[f"{memory}_peak"] for cell in (few, many))
        if before is not None:
            lines.append(
                f"- {way}, {memory} memory: {before / 1e6:.0f} MB with {few['clients']:,} clients, {after / 1e6:.0f} MB with "
                f"{many['clients']:,}: {(after - before) / added / network:.3f} networks of {network / 1e6:.2f} MB per client added"
            )
    return lines


def page(record: Record) -> list[str]:
    """The table, the growth of each part and, where clients were trained together too, how much faster that was."""
    cells = sorted(record["cells"], key=lambda cell: (cell["way"], cell["clients"]))
    unit = unit_of(cells)
    heads = ["clients", "trained", "steps", *PHASES, "total s", "on the clock s", "host MB", "device MB", "disk MB"]
    lines = [
        f"# {record['samples']:,} images of {record['data']}, {record['epochs']} epoch(s), the small CNN, "
        f"{record['test_images']:,} test images",
        "",
        f"Phases in {'seconds' if unit == 'seconds' else 'seconds of the processor, one thread'}.",
        "",
        *markdown_head(heads),
    ]
    for cell in cells:
        times = [*(cell[unit][name] for name in PHASES), sum(cell[unit].values()), sum(cell["seconds"].values())]
        device = "" if cell["device_peak"] is None else f"{cell['device_peak'] / 1e6:.0f}"
        sizes = [f"{cell['host_peak'] / 1e6:.0f}", device, f"{sum(cell['bytes'].values()) / 1e6:.1f}"]
        shown = [f"{value:.2f}" for value in times]
        lines.append(markdown_row([f"{cell['clients']:,}", cell["way"], f"{cell['steps']:,}", *shown, *sizes]))
    lines += growth(cells, ALONE) + growth(cells, TOGETHER) + [""]
    alone = {cell["clients"]: cell[unit]["training"] for cell in cells if cell["way"] == ALONE}
    for cell in cells:
        if cell["way"] == TOGETHER and cell["clients"] in alone:
            ratio = alone[cell["clients"]] / cell[unit]["training"]
            lines.append(f"- {cell['clients']:,} clients trained together: {ratio:.1f} times as fast as one by one")
    return lines


def main() -> None:
    parser = arguments(__doc__, "scaling")
    parser.set_defaults(data="fashion-mnist", out=Path("results/scaling"))
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 10, 20, 100, 500, 1000], metavar="N")
    parser.add_argument("--batched", type=int, nargs="*", metavar="N", help="counts that are trained together as well (on a GPU: those from 100 on)")  # fmt: skip
    parser.add_argument("--samples", type=int, default=60_000, help="training images in all")
    parser.add_argument("--test-images", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--one", nargs=2, metavar=("CLIENTS", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_one(int(options.one[0]), options.one[1], options)))
        return
    if only_pages(options, KEYS, page):
        return

    def measure(cell: Cell, _deadline: float) -> Record:
        clients, way = cell
        named = {name: getattr(options, name.replace("-", "_")) for name in (*shared, "runs", "data-dir", "device")}
        words = [word for name, value in named.items() if value is not None for word in (f"--{name}", str(value))]
        sets = [word for text in options.sets for word in ("--set", text)]
        done: Record = in_own_process("--one", str(clients), way, *words, *sets)
        return done

    from oneround.site import choose_device

    shared = ("data", "samples", "test-images", "batch-size", "epochs")
    setting = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in shared}
    study = Study(options, KEYS, {**setting, "sets": options.sets}, page)
    batched = options.batched
    if batched is None:
        batched = (
            [count for count in options.clients if count >= 100] if choose_device(options.device).type == "cuda" else []
        )
    cells = [(count, ALONE) for count in options.clients] + [(count, TOGETHER) for count in batched]
    study.measure_missing(cells, lambda cell, deadline: measure(cell, deadline), summary_of)
    print("\n".join(page(json.loads(study.record_file.read_text()))))


def summary_of(done: Record) -> str:
    each = ", ".join(f"{name} {value:.2f}" for name, value in done["seconds"].items())
    return f"{sum(done['seconds'].values()):.1f} s ({each}), {done['host_peak'] / 1e6:.0f} MB"


if __name__ == "__main__":
    main()
