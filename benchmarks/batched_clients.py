"""Small clients trained together, as one network, against one by one: operations of a step, seconds and memory of an epoch.

    python benchmarks/batched_clients.py                                          # 44 clients of 60 images, a batch each
    python benchmarks/batched_clients.py --clients 1000 --out results/batched_clients.json
    python benchmarks/batched_clients.py --size 8 --width 8 --samples 28 --clients 50

Images are noise in the shape of Fashion-MNIST, so nothing is downloaded. Only training is timed: no state, upload or scoring.
Both ways train all clients for `--epochs` epochs, in turns after a first turn that is not counted (a GPU records its steps in it);
seconds are medians over `--turns`. Operations are those that PyTorch dispatches in one eager step of every client; a recorded
step launches their kernels at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oneround import acts
from oneround.config.load import load, parse_override
from oneround.config.recipe import Local
from oneround.data import dataset_from_arrays
from oneround.runs.environment import environment
from oneround.simulate.batching import groups
from oneround.site import Site
from oneround.training import Learner, Trainer
from oneround.training.batched_loop import Group
from oneround.training.step import Stepper


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="fafi")
    parser.add_argument("--clients", type=int, default=44)
    parser.add_argument("--samples", type=int, default=60, help="of a client, one batch if there are no more")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--size", type=int, default=28, help="pixels of an image's side")
    parser.add_argument("--width", type=int, default=32, help="of the small CNN")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()

    load_before = os.getloadavg()
    random = torch.Generator().manual_seed(0)
    total = options.clients * options.samples
    images = torch.randint(0, 256, (total, options.size, options.size), dtype=torch.uint8, generator=random)
    labels = torch.arange(total) % 10
    data = dataset_from_arrays("noise", images, labels, images[:10], labels[:10])
    recipe = load(options.preset, [
        ("model.encoder", {"kind": "cnn", "width": options.width}), ("training.batch_size", options.batch_size),
        ("training.epochs", options.epochs), ("trace.every", 0), ("local.device", options.device),
        *(parse_override(text) for text in options.sets),
    ])  # fmt: skip
    recipe = acts.resolve(recipe, data)
    broadcast = acts.prepare(recipe, data.class_names, data.shape)
    parts = torch.arange(total).split(options.samples)

    def sites(local: Local = recipe.local) -> dict[str, Site]:
        return {f"client_{number:04d}": Site(f"client_{number:04d}", data.train.take(part), local=local) for number, part in enumerate(parts)}  # fmt: skip

    members = groups(recipe, data.shape, {name: len(part) for name, part in zip(sites(), parts, strict=True)})

    def one_by_one(trainer: Trainer, local: Local = recipe.local, clients: int | None = None, epochs: int = options.epochs) -> None:  # fmt: skip
        for site in list(sites(local).values())[:clients]:
            Learner(broadcast, site, trainer=trainer).train(epochs)

    def together(trainer: Trainer, local: Local = recipe.local, first: int | None = None, epochs: int = options.epochs) -> None:  # fmt: skip
        by_name = sites(local)
        for names, slots in members[:first]:
            Group(broadcast, {slot: by_name[name] for slot, name in enumerate(names)}, slots, trainer=trainer).train(epochs)  # fmt: skip

    device = Site("", local=recipe.local).device
    with Site("", local=recipe.local).arithmetic(broadcast.parameters, search=True):
        eager = recipe.local.model_copy(update={"record": False})
        threads = torch.get_num_threads()
        alone = operations(lambda: one_by_one(Trainer(), eager, 1, 1))
        grouped = operations(lambda: together(Trainer(), eager, 1, 1))
        ways = {"one by one": one_by_one, "together": together}
        trainers, seconds = {way: Trainer() for way in ways}, {way: list[float]() for way in ways}
        peaks = dict.fromkeys(ways, 0)
        for turn in range(options.turns + 1):
            for way, work in ways.items():
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                started = time.perf_counter()
                work(trainers[way])
                if device.type == "cuda":
                    torch.cuda.synchronize()
                    peaks[way] = torch.cuda.max_memory_allocated()
                if turn:
                    seconds[way].append((time.perf_counter() - started) / options.epochs)
                    print(f"turn {turn}, {way}: {seconds[way][-1]:.3f} s per epoch of all clients", flush=True)
    size = len(members[0].names)
    median = {way: statistics.median(each) for way, each in seconds.items()}
    figures = {
        "clients": options.clients, "samples_per_client": options.samples, "image": list(data.shape),
        "model": recipe.encoder.label, "preset": options.preset, "groups": len(members), "clients_in_a_group": size,
        "operations_per_step_of_a_group": {"one by one": size * alone, "together": grouped},
        "ratio_of_operations": size * alone / grouped,
        "seconds_per_epoch": median, "ratio_of_seconds": median["one by one"] / median["together"], "turns": seconds,
        "threads": threads, "load_average_before": load_before, "environment": environment(device),
    }  # fmt: skip
    if device.type == "cuda":
        figures["peak_device_memory_gb"] = {way: peak / 1e9 for way, peak in peaks.items()}
    print(json.dumps({key: value for key, value in figures.items() if key not in ("turns", "environment")}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def operations(train: Callable[[], None]) -> int:
    """Operations of a step while this trains."""
    counts, step = [], Stepper._step

    def counted(self: Stepper, *batch: torch.Tensor) -> None:
        with Operations() as counter:
            step(self, *batch)
        counts.append(counter.count)

    Stepper._step = counted  # type: ignore[method-assign]
    try:
        train()
    finally:
        Stepper._step = step  # type: ignore[method-assign]
    return counts[0]


if __name__ == "__main__":
    main()
