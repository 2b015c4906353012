"""How fast and how lean is one pass that sums features? Images per second and peak memory of a client that holds all images.

    python benchmarks/ridge_pass.py --data-dir data --sizes 2400 4800 9600 --out results/ridge_pass.json
    python benchmarks/ridge_pass.py --data-dir data --sizes 9600 --samples 4000 --device cpu     # memory does not grow with images

Each size is a process of its own: the data is loaded, the features are built, the client sums and packs its upload.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

from common import in_own_process, parser_of, write_json


def one_pass(size: int, options: argparse.Namespace) -> None:
    import torch

    from oneround import acts
    from oneround.config.load import load
    from oneround.config.recipe import Local
    from oneround.data import load_dataset
    from oneround.protocol.encoding import bytes_of, layout_of
    from oneround.runs.environment import environment
    from oneround.site import Site

    recipe = load("ridge", [
        ("data.kind", options.data), ("local.data_path", options.data_dir), ("sums.features", {"kind": "patches", "size": size}),
    ])  # fmt: skip
    data = load_dataset(recipe.data, recipe.local.data_path)
    recipe = acts.resolve(recipe, data)
    broadcast = acts.prepare(recipe, data.class_names, data.shape)
    mine = data.train.take(torch.arange(min(options.samples or len(data.train), len(data.train))))
    site = Site("site", mine, local=Local(device=options.device))
    if site.device.type == "cuda":  # the first products set up the device
        acts.train(broadcast, Site("first", mine.take(torch.arange(1024)), local=site.local))
    started = time.monotonic()
    upload = acts.train(broadcast, site)
    seconds = time.monotonic() - started
    print(json.dumps({
        "size": size, "images": len(mine), "seconds": seconds, "images_per_second": len(mine) / seconds, "upload_bytes": bytes_of(layout_of(upload.sums)),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if site.device.type == "cuda" else None,
        "environment": environment(site.device),
    }))  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1200, 2400, 4800, 6696, 9600])
    parser.add_argument("--samples", type=int, help="images of the client; otherwise all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one_pass(options.one, options)
        return
    passes = []
    for size in options.sizes:
        figures = in_own_process(*sys.argv[1:], "--one", str(size))
        passes.append(figures)
        device = f", device {figures['device_peak_bytes'] / 1e9:.2f} GB" if figures["device_peak_bytes"] else ""
        print(f"D {size}: {figures['images']:,} images in {figures['seconds']:.1f} s, {figures['images_per_second']:,.0f}/s; "
              f"peak host {figures['host_peak_bytes'] / 1e9:.2f} GB{device}; upload {figures['upload_bytes'] / 1e6:.0f} MB", flush=True)  # fmt: skip
        if options.out:
            write_json(options.out, {"limit_bytes": 3e9, "passes": passes})


if __name__ == "__main__":
    main()
