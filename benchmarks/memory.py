"""Does memory grow with the number of clients? Peak of a ResNet-18 run with 20 and with 200 clients, one step each.

    python benchmarks/memory.py --out results/memory.json        # 8×8 digits; needs about 20 GB of disk for a while

Each run is a process of its own: one epoch of one step per client, uploads written, scored by IFFI, fused and saved. Prints
the peak of host memory (and of device memory on a GPU) of both, and the growth in network sizes per client added.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from dataclasses import replace
from pathlib import Path

from common import in_own_process, parser_of, write_json

SAMPLES = 4


def one_run(clients: int, folder: Path, device: str) -> None:
    import torch

    from oneround.config.load import load
    from oneround.data import load_dataset
    from oneround.protocol import Broadcast
    from oneround.runs.environment import environment
    from oneround.simulate import run
    from oneround.site import choose_device

    recipe = load("fafi", [
        ("model.encoder", "resnet18"), ("training.epochs", 1), ("training.batch_size", SAMPLES), ("fusion", ["iffi"]),
        ("partition.kind", "iid"), ("partition.clients", clients), ("local.device", device), ("local.workers", 1),
    ])  # fmt: skip
    digits = load_dataset(recipe.data)
    data = replace(digits, train=digits.train.take(torch.arange(SAMPLES * clients)))
    run(recipe, folder, data=data)
    weights = Broadcast.read(folder / "broadcast.safetensors").weights
    print(json.dumps({
        "clients": clients,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() and device != "cpu" else None,
        "network_bytes": sum(tensor.numel() * tensor.element_size() for tensor in weights.values()),
        "environment": environment(choose_device(device)),
    }))  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", nargs=2, type=int, default=[20, 200], metavar=("FEW", "MANY"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("CLIENTS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one_run(int(options.one[0]), Path(options.one[1]), options.device)
        return
    few_clients, many_clients = options.clients
    peaks = {}
    for clients in options.clients:
        with tempfile.TemporaryDirectory() as folder:
            peaks[clients] = in_own_process("--device", options.device, "--one", str(clients), f"{folder}/run")
    network, added = peaks[few_clients]["network_bytes"], many_clients - few_clients
    figures: dict[str, object] = {
        "environment": peaks[few_clients].pop("environment"),
        "network_bytes": network,
        "limit": 0.1,
    }
    peaks[many_clients].pop("environment")
    for memory in ("host", "device"):
        few, many = peaks[few_clients][f"{memory}_peak_bytes"], peaks[many_clients][f"{memory}_peak_bytes"]
        if few is None:
            continue
        growth = (many - few) / (added * network)
        figures[memory] = {
            f"{few_clients}_clients": few,
            f"{many_clients}_clients": many,
            "networks_per_client_added": growth,
        }
        print(f"{memory}: {few / 1e6:.0f} MB with {few_clients} clients, {many / 1e6:.0f} MB with {many_clients}: "
              f"{growth:.4f} networks of {network / 1e6:.0f} MB per client added (limit 0.1)")  # fmt: skip
    if options.out:
        write_json(options.out, figures)


if __name__ == "__main__":
    main()
