"""How fast local training is: samples per second, seconds per epoch over all clients, share of the device's own
matrix-product rate.

    python benchmarks/epoch_time.py --data cifar10 --data-dir data            # the reference setting, on a GPU
    python benchmarks/epoch_time.py --data digits --model cnn --batch-size 64 # on a laptop

Trains with the program's own workers, all clients of partition 1 at α = 0.05 (5 clients, ResNet-18, batch 512, two views):
first epoch by epoch, with an upload and a switch after every client's epoch (the median of the times from one epoch's last upload to
the next one's, without the first three, in which steps are recorded), then several epochs of every client in one go, whose seconds per
epoch are the training time. A client's next epoch waits for its own upload, not for the others'. The rate it is compared with is measured in the same run: an 8192³ bf16 product on a GPU, a 2048³
fp32 product on a CPU. Operations are counted as three forward passes (forward, gradient of input, gradient of weights) of
the encoder's multiply-adds: 3.34 GFLOP per view for ResNet-18 at 32 pixels. Augmentation, losses, optimiser and clipping
are inside the time and outside the count.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import parser_of, write_json


def seconds_since_process_start() -> float:
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def matrix_product_rate(device, torch) -> float:
    """Median FLOP/s of square products of random matrices."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(13):
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times[3:])


def sustained_rate(device, torch, seconds: float = 2.0) -> float:
    """FLOP/s of the same products one after another for so long, as a training step runs: what the card's power allows."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        for _ in range(50 if device.type == "cuda" else 1):
            a @ b
            done += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
    return 2 * size**3 * done / (time.perf_counter() - started)


@contextmanager
def sampled_clocks(device) -> Iterator[dict[str, float]]:
    """Medians of the card's clock (MHz) and power (W) within the context; empty where nvidia-smi is missing."""
    figures: dict[str, float] = {}
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        yield figures
        return
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as sampler:
        try:
            yield figures
        finally:
            sampler.terminate()
            lines = sampler.communicate()[0].splitlines()
    samples = [[float(value) for value in line.split(",")] for line in lines if line.count(",") == 1]
    for name, values in zip(("clock_mhz", "power_watts"), zip(*samples, strict=True), strict=False):
        figures[name] = statistics.median(values)


def forward_flops(encoder, shape, torch) -> int:
    """Floating-point operations of one image through the convolutions and linear layers."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder.eval()(torch.zeros(1, *shape))
    return counter.get_total_flops()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument(
        "--turns", type=int, default=12, help="epochs with a switch after each; the median leaves out the first three"
    )
    parser.add_argument("--epochs", type=int, default=10, help="in one go")
    parser.add_argument("--samples", type=int, help="train on the first so many samples only")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()

    import torch

    from oneround import acts
    from oneround.config.load import load, parse_override
    from oneround.data import load_dataset, partitions
    from oneround.models.prototype import build
    from oneround.runs.environment import environment
    from oneround.runs.folder import RunFolder
    from oneround.simulate.workers import TrainJob, WorkerPool
    from oneround.site import Site

    events: list[dict[str, Any]] = []
    recipe = load("fafi", [
        ("data.kind", options.data), ("local.data_path", options.data_dir), ("model.encoder.kind", options.model),
        ("training.batch_size", options.batch_size), ("training.epochs", options.turns + options.epochs + 1), ("fusion", ["iffi"]),
        *(parse_override(text) for text in options.sets),
    ])  # fmt: skip
    data = load_dataset(recipe.data, recipe.local.data_path)
    recipe = acts.resolve(recipe, data)
    split = partitions.of(recipe.partition).split(data, recipe.seeds.partition)
    clients = [index[: options.samples] for index in split.clients if len(index)]
    broadcast = acts.prepare(recipe, data.class_names, data.shape)
    device = Site("", local=recipe.local).device
    views = 2 * sum(len(index) for index in clients)

    with tempfile.TemporaryDirectory() as name, WorkerPool(data.train, 1, events.append) as pool:
        folder = RunFolder(Path(name))
        broadcast.write(folder.broadcast)

        order = sorted(range(len(clients)), key=lambda number: -len(clients[number]))
        uploads: dict[int, Any] = {}
        ended: dict[int, float] = {}

        def train_to(epoch: int) -> None:
            for number in order:
                if number in uploads:
                    uploads[number].result()
                job = TrainJob(f"client_{number:03d}", clients[number], folder, epoch, recipe.local)
                uploads[number] = pool.submit(job)
                uploads[number].add_done_callback(lambda _, epoch=epoch: ended.update({epoch: time.perf_counter()}))

        def wait() -> float:
            for each in uploads.values():
                each.result()
            return time.perf_counter()

        train_to(1)
        wait()
        first = seconds_since_process_start()
        for epoch in range(2, options.turns + 1):
            train_to(epoch)
        middle = wait()
        switched = statistics.median(ended[epoch] - ended[epoch - 1] for epoch in range(4, options.turns + 1))
        print(f"{switched:.3f} s an epoch with uploads and a switch of clients", flush=True)
        with sampled_clocks(device) as clocks:
            train_to(options.turns + options.epochs)
            seconds = (wait() - middle) / options.epochs
        print(f"{seconds:.3f} s an epoch of {options.epochs} in one go", flush=True)

    per_view = 3 * forward_flops(build(recipe.model.encoder, data.shape[0], data.classes).encoder, data.shape, torch)
    rate, sustained = matrix_product_rate(device, torch), sustained_rate(device, torch)
    figures = {
        "device": environment(device)["device"], "commit": environment(device)["commit"], "torch": torch.__version__,
        "data": data.name, "model": recipe.model.encoder.label, "clients": len(clients), "samples": views // 2,
        "compiled": recipe.local.compile, "recorded": recipe.local.record, "bf16": Site("", local=recipe.local).bf16, "epochs": options.epochs,
        "seconds_per_epoch": seconds, "with_switches": switched, "with_switches_over_training": switched / seconds,
        "samples_per_second": views / 2 / seconds, "gflop_per_view": per_view / 1e9,
        "matrix_product_tflops": rate / 1e12, "sustained_matrix_product_tflops": sustained / 1e12, "share_of_matrix_product_rate": per_view * views / seconds / rate,
        "share_of_sustained_rate": per_view * views / seconds / sustained, "clocks_and_power_while_training": clocks,
        "seconds_from_process_start_to_first_epoch": first,
    }  # fmt: skip
    if device.type == "cuda":
        figures["peak_device_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    print(json.dumps(figures, indent=1))
    if options.out:
        write_json(options.out, figures)


if __name__ == "__main__":
    main()
