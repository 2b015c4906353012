"""What buys a ridge accuracy: features, layers, pooling, patches, mirror images and precision, per megabyte and per second.

    python benchmarks/ridge.py --data cifar10 --data-dir data --out results/cifar10_ridge            # all designs; run again to go on
    python benchmarks/ridge.py --designs "D 1200" "D 2400" --samples 10000 --out results/x           # some, on fewer images
    python benchmarks/ridge.py --render results/cifar10_ridge.json                                    # the page again

Five very skewed clients (α = 0.05) sum a design's features over their images, the server adds and solves. A tenth of the images
is held back: the design is chosen by their accuracy, then their sums are added to the clients' and test accuracy is measured.
Every design is a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import in_own_process, markdown_head, markdown_row, parser_of, write_json

WIDE = 6688  # features whose sums in fp32 are just below 90 MB
DESIGNS: dict[str, dict[str, Any]] = {
    "D 1200": {"features.size": 1200},
    "D 2400": {"features.size": 2400},
    "D 4800": {"features.size": 4800},
    "D 6688": {"features.size": WIDE},
    "D 9400": {"features.size": 9400, "precision": "fp16"},
    "D 9400, int16": {"features.size": 9400, "precision": "int16"},
    "D 9600": {"features.size": 9600},
    "no mirror": {"features.size": WIDE, "mirror": "none"},
    "mirrored copies": {"features.size": WIDE, "mirror": "copies"},
    "two layers": {"features.size": WIDE, "features.layers": 2},
    "two layers, 64 maps": {"features.size": WIDE, "features.layers": 2, "features.maps": 64},
    "two layers, fp16": {"features.size": 9400, "features.layers": 2, "features.maps": 64, "precision": "fp16"},
    "grid 1": {"features.size": WIDE, "features.grid": 1},
    "grid 3": {"features.size": WIDE // 18 * 18, "features.grid": 3},
    "grid 4": {"features.size": WIDE, "features.grid": 4},
    "patch 5": {"features.size": WIDE, "features.patch": 5},
    "patch 7": {"features.size": WIDE, "features.patch": 7},
    "patch 8": {"features.size": WIDE, "features.patch": 8},
    "threshold 0": {"features.size": WIDE, "features.threshold": 0.0},
    "threshold 0.5": {"features.size": WIDE, "features.threshold": 0.5},
    "whitening 0.1": {"features.size": WIDE, "features.whitening": 0.1},
    "whitening 1": {"features.size": WIDE, "features.whitening": 1.0},
    "patches of public images": {"features.size": WIDE, "features.source": "public"},
}
SMALLER: dict[str, dict[str, Any]] = {
    "int16": {"precision": "int16"},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "rank D/8": {"rank": 8},
}
"""Smaller uploads of the same sums; `rank` is a share of D."""


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One design, from images to accuracies."""
    import torch

    from oneround import sums
    from oneround.config.load import load
    from oneround.data import load_dataset
    from oneround.data.augment import preprocessing
    from oneround.protocol.encoding import bytes_of
    from oneround.server.plan import DealtPlan

    changes = [(f"sums.{key}", value) for key, value in DESIGNS[name].items()]
    public = 0.02 if DESIGNS[name].get("features.source") == "public" else 0.0
    recipe = load("ridge", [
        ("data.kind", options.data), ("local.data_path", options.data_dir), ("local.device", options.device),
        ("partition.clients", 5), ("partition.alpha", 0.05), ("validation", 0.1), ("public", public), *changes,
    ])  # fmt: skip
    plan = DealtPlan.of(recipe, load_dataset(recipe.data, recipe.local.data_path))
    data, recipe, device = plan.data, plan.recipe, plan.server().device
    assert recipe.sums is not None
    broadcast = plan.prepare()
    features = sums.features_of(recipe, data.shape, sums.constants_of(recipe, data.shape, broadcast.extras)).to(device)
    mean, std = preprocessing(recipe)

    def gathered(index: Any) -> sums.Moments:
        images = data.train.take(index[: options.samples] if options.samples else index).to(device)
        return sums.gather(features, images, data.classes, mean, std, mirrored=recipe.sums.mirror == "copies")

    variants = {"": recipe.sums}
    if not options.quick and recipe.sums.precision == "fp32":
        variants |= {
            key: recipe.sums.model_copy(update={**how, **({"rank": features.size // how["rank"]} if "rank" in how else {})})
            for key, how in SMALLER.items()
        }  # fmt: skip
    seconds, images_summed = 0.0, 0
    totals = {key: sums.Moments.zero(features.size, data.classes, device) for key in variants}
    for index in (index for index in plan.split.clients if len(index)):
        started = time.monotonic()
        mine = gathered(index)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.monotonic() - started
        images_summed += int(mine.samples) // recipe.sums.copies
        for key, how in variants.items():
            totals[key].include(sums.unpacked(sums.packed(mine, how), device))
    # The sums of all clients are complete; now the validation and the test images are used.
    validation = data.train.take(plan.split.validation[: options.samples] if options.samples else plan.split.validation)
    tests = {"validation": validation, "test": data.test}
    answers = {part: in_batches(features, images, device, mean, std) for part, images in tests.items()}
    record: dict[str, Any] = {
        "design": DESIGNS[name], "size": features.size, "bytes": bytes_of(broadcast.sums), "images": images_summed,
        "images_per_second": images_summed / seconds, "seconds": seconds, "accuracy": {},
    }  # fmt: skip
    more = gathered(plan.split.validation)
    for key, total in totals.items():
        solution = sums.solve(total, copies=recipe.sums.copies)
        chosen = accuracy(solution, answers["validation"], validation.labels)
        total.include(more)
        solution = sums.solve(total, copies=recipe.sums.copies)
        record["accuracy"][key or recipe.sums.precision] = {
            "validation": chosen, "test": accuracy(solution, answers["test"], data.test.labels),
            "bytes": bytes_of(sums.sums_layout(recipe.model_copy(update={"sums": variants[key]}), features.size, data.classes)),
            "penalty": solution.penalty, "freedom": solution.freedom,
        }  # fmt: skip
    record["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    record["device_peak_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return record


def in_batches(features: Any, images: Any, device: Any, mean: float, std: float) -> Any:
    """(n, D) on the CPU."""
    import torch

    from oneround.models.features import in_batches

    matrix = torch.empty(len(images), features.size)
    with torch.inference_mode():
        for start, batch in enumerate(images.batches(device, mean, std)):
            matrix[500 * start : 500 * start + 500] = in_batches(
                features, batch, features.batch_size, features.size
            ).cpu()
    return matrix


def accuracy(solution: Any, matrix: Any, labels: Any) -> float:
    scores = (matrix - solution.centre.float().cpu()) @ solution.weights.float().cpu() + solution.bias.float().cpu()
    return float((scores.argmax(1) == labels).float().mean())


def render(record: dict[str, Any]) -> str:
    """The record as a page of Markdown."""
    from study import measured_on

    lines = [
        f"# Ridge on {record['data']}: what buys accuracy\n",
        f"Five clients, α = 0.05, partition 1{record['note']}; a tenth of the training images held back to choose a design by (validation),",
        "then added. Accuracy in %; up: megabytes per client; images/s: one pass of all clients, one after another.\n",
        *markdown_head(["design", "D", "up, MB", "validation", "test", "images/s", "host peak, GB", "device peak, GB"]),
    ]
    for name, cell in record["designs"].items():
        peak = [cell["host_peak_bytes"], cell["device_peak_bytes"]]
        for how, scores in cell["accuracy"].items():
            first = how in ("fp32", cell["design"].get("precision"))
            row = [name if first else f"… {how}", f"{cell['size']:,}", f"{scores['bytes'] / 1e6:.1f}"]
            row += [f"{100 * scores[part]:.2f}" for part in ("validation", "test")]
            row += [f"{cell['images_per_second']:,.0f}", *(f"{each / 1e9:.1f}" if each else "–" for each in peak)]
            lines.append(markdown_row(row if first else [*row[:5], "", "", ""]))
    fitting = {
        (name, how): scores
        for name, cell in record["designs"].items()
        for how, scores in cell["accuracy"].items()
        if scores["bytes"] <= 90e6
    }
    if fitting:
        (name, how), best = max(fitting.items(), key=lambda item: item[1]["validation"])
        lines.append(
            f"\nChosen on validation images among uploads of at most 90 MB: {name} ({how}), {100 * best['test']:.2f} % on test images."
        )
    lines += [
        "",
        f"- {measured_on(record['environment'], (cell['commit'] for cell in record['designs'].values()))}",
        f"- command: `python benchmarks/ridge.py {record['arguments']}`",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--designs", nargs="+", choices=DESIGNS, default=list(DESIGNS), metavar="NAME")
    parser.add_argument("--samples", type=int, help="of every client at most; otherwise all")
    parser.add_argument("--quick", action="store_true", help="leave out the smaller uploads of the same sums")
    parser.add_argument("--minutes", type=float, default=600, help="begin no design after so long")
    parser.add_argument("--out", type=Path, default=Path("results/cifar10_ridge"))
    parser.add_argument("--render", type=Path, metavar="RECORD.json", help="only make the page of a record again")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options)))
        return
    from oneround.runs.environment import environment
    from oneround.site import choose_device
    from study import sibling

    if options.render:
        sibling(options.render, ".md").write_text(render(json.loads(options.render.read_text())))
        return
    started = time.monotonic()
    record_file = sibling(options.out, ".json")
    earlier: dict[str, Any] = json.loads(record_file.read_text()) if record_file.exists() else {"designs": {}}
    machine = environment(choose_device(options.device))
    command_line = [f"--data {options.data}", f"--device {options.device}", *(["--quick"] if options.quick else [])]
    command_line += [f"--samples {options.samples}"] if options.samples else []
    command_line += ["--designs", *map(repr, options.designs)] if options.designs != list(DESIGNS) else []
    record = {
        "data": options.data, "note": f", {options.samples:,} images of a client at most" if options.samples else "",
        "designs": earlier["designs"], "environment": machine, "arguments": " ".join(command_line),
    }  # fmt: skip
    for name in options.designs:
        if name in record["designs"] or time.monotonic() - started > 60 * options.minutes:
            continue
        try:
            measured = in_own_process(*sys.argv[1:], "--one", name)
        except subprocess.CalledProcessError as error:
            print(f"{name}: left out, {error.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        record["designs"][name] = {**measured, "commit": machine["commit"]}
        write_json(record_file, record)
        sibling(options.out, ".md").write_text(render(record))
        scores = measured["accuracy"].items()
        accuracies = (f"{how} {100 * each['test']:.2f} ({each['bytes'] / 1e6:.0f} MB)" for how, each in scores)
        print(f"{name}: {', '.join(accuracies)}", flush=True)
    print(f"{len(record['designs'])} of {len(DESIGNS)} designs; {sibling(options.out, '.md')}")


if __name__ == "__main__":
    main()
