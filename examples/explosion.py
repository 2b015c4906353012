# ruff: noqa: T201
"""Why λ explodes, on the embedded digits: V12 against its four cures, three seeds each, in about a minute on two cores.

    python examples/explosion.py
    python examples/explosion.py --seeds 1 2 3 --out runs/explosion
    python examples/explosion.py --seeds 3 --set training.batch_size=16        # any recipe key, for all methods

V12 (`etf-attenuated`) learns λ from a loss that a falling factor s enters, and answers by learning a larger and larger λ:
prototypes are dragged to their anchors while gradient clipping leaves next to nothing for the encoder, and the fused model
falls far below its own peak. The cures bound λ (`etf-guarded`, `etf-hinge`), put s where it relaxes λ (`etf-decaying`), or
compute λ instead of learning it (`etf-equilibrium`). docs/why-lambda-explodes.md has the derivation.

Everything lands in --out: `explosion.png`, `explosion.json`, and a run folder for each method and seed. Test accuracy is looked
at to draw curves only; nothing is chosen by it in a run. Exit code 1: one of the claims does not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

# The same for all methods. Chosen, by trying, so that a minute is enough to see what takes 50 epochs of CIFAR-10 otherwise.
SETTINGS: dict[str, Any] = {
    "data": "digits",
    # Four of ten classes each, and as many samples: all clients take as many steps, so λ has as long to grow at each of them.
    "partition": {"kind": "shards", "clients": 5, "labels_per_client": 4},
    "model": {"encoder": {"kind": "cnn", "width": 8}},  # a quarter of the demo's width, for the time
    "training.augment.crop_scale": [0.6, 1.0],  # as in the demo: a digit stays a digit
    "training.batch_size": 20,  # 15 steps an epoch, 300 in all
    "training.epochs": 20,
    "training.learning_rate": 0.1,  # few steps: larger than FAFI's 0.05, and
    "training.schedule": "cosine",  # falling, so that what is left at the end is the effect and not the noise of the last step
    "fusion": ["iffi"],
    "snapshots": 4,
    "trace.every": 0,
    "local.device": "cpu",
    "local.threads": 1,
    "local.workers": 1,  # two runs side by side instead of two clients
}
# For those that learn σ: forty times the presets' pace, so that σ is near its rest point all the time.
LEARNED: dict[str, Any] = {"alignment.weight.rate": 4.0}

EXPLODES = "etf-attenuated"
CHANGES: dict[str, dict[str, Any]] = {
    EXPLODES: LEARNED,
    "etf-guarded": LEARNED,
    "etf-hinge": LEARNED,
    "etf-decaying": LEARNED,
    "etf-equilibrium": {},  # learns nothing
}
LABELS = {
    EXPLODES: "V12 (etf-attenuated)",
    "etf-guarded": "V13 (etf-guarded)",
    "etf-hinge": "V14 (etf-hinge)",
    "etf-decaying": "etf-decaying",
    "etf-equilibrium": "etf-equilibrium",
}
COLOURS = dict(zip(CHANGES, ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#000000"), strict=True))  # Okabe & Ito

GROWTH = 100.0  # V12: some client's λ grows at least so many times from its first to its last epoch,
FALL = 10.0  # and accuracy ends at least so many points below its peak;
CALM = 3.0  # the others end at most so many points below theirs
MARK = ".explosion-example"

Record = dict[str, Any]


# --- one run -----------------------------------------------------------------------------------------------------------


def overrides(method: str, seed: int) -> dict[str, Any]:
    """What is changed in a preset."""
    seeds = {f"seeds.{kind}": seed for kind in ("partition", "initialisation", "training")}
    return SETTINGS | CHANGES[method] | seeds


def measure(method: str, seed: int, folder: Path, more: Mapping[str, Any]) -> Record:
    """Run one method on one seed: raw λ of every client after every epoch, and accuracy at every snapshot."""
    from oneround.observe.log import MetricsLog
    from oneround.reading import load
    from oneround.simulate import run

    warnings: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "trouble":
            warnings.append(event["text"])

    started = time.monotonic()
    result = run(load(method, (overrides(method, seed) | dict(more)).items()), folder, emit=listen)
    weights: dict[str, list[float]] = {}
    for event in MetricsLog(folder / "metrics.jsonl"):
        if event["event"] == "epoch":
            weights.setdefault(event["client"], []).append(event["lambda_raw"])
    return {
        "method": method, "seed": seed, "partition": result.partition, "lambda": weights,
        "accuracy": {str(epoch): 100 * value for epoch, value in result.curves["iffi"].items()},
        "warnings": warnings, "seconds": time.monotonic() - started,
    }  # fmt: skip


def measure_all(seeds: Sequence[int], out: Path, more: Mapping[str, Any]) -> list[Record]:
    """Every method on every seed, two runs at a time, told as they finish; in the order of the methods."""
    cells = [(method, seed) for method in CHANGES for seed in seeds]
    found: dict[tuple[str, int], Record] = {}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(measure, *cell, out / f"{cell[0]}-{cell[1]}", more): cell for cell in cells}
        for done in as_completed(waiting):
            record = found[waiting[done]] = done.result()
            print(f"[{len(found)}/{len(cells)}] {in_words(record)}", flush=True)
            for text in record["warnings"]:
                print(f"    {text.partition(';')[0]}", flush=True)
    return [found[cell] for cell in cells]


# --- what a run shows --------------------------------------------------------------------------------------------------


def largest(record: Record) -> list[float]:
    """λ of the client whose λ is largest at the end, epoch by epoch."""
    return max(record["lambda"].values(), key=lambda values: values[-1])


def growth(record: Record) -> float:
    """The most that a client's λ grew from its first to its last epoch, as a factor."""
    return max(values[-1] / values[0] for values in record["lambda"].values())


def peak(record: Record) -> float:
    return max(record["accuracy"].values())


def final(record: Record) -> float:
    """Accuracy after the last epoch."""
    return record["accuracy"][max(record["accuracy"], key=int)]


def drop(record: Record) -> float:
    """Points from the peak to the end."""
    return peak(record) - final(record)


def in_words(record: Record) -> str:
    return f"{record['method']}, seed {record['seed']}: {final(record):.1f} %, peak {peak(record):.1f} % ({record['seconds']:.0f} s)"


# --- the claims --------------------------------------------------------------------------------------------------------


def broken(record: Record) -> list[str]:
    """The claims that this run does not bear out, in words."""
    where = f"{record['method']}, seed {record['seed']}"
    if not all(map(math.isfinite, (growth(record), drop(record)))):
        return [f"{where}: figures are not finite"]
    if record["method"] != EXPLODES:
        return (
            [] if drop(record) <= CALM else [f"{where}: ends {drop(record):.1f} points below its peak, not ≤ {CALM:g}"]
        )
    wrong = []
    if growth(record) < GROWTH:
        wrong.append(f"{where}: λ grows × {growth(record):.3g}, not ≥ {GROWTH:g}")
    if drop(record) < FALL:
        wrong.append(f"{where}: ends {drop(record):.1f} points below its peak, not ≥ {FALL:g}")
    return wrong


def verdicts(records: Iterable[Record]) -> list[tuple[str, bool]]:
    """A line for each method, and whether its claim holds on every seed."""
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault(record["method"], []).append(record)
    lines = []
    for method, mine in by_method.items():
        wrong = [text for record in mine for text in broken(record)]
        falls = ", ".join(f"{drop(record):.1f}" for record in mine)
        claim = f"λ × ≥ {GROWTH:g} and a fall of ≥ {FALL:g}" if method == EXPLODES else f"a fall of ≤ {CALM:g}"
        lines.append((f"{LABELS[method]}: ends {falls} points below its peaks; claimed: {claim}", not wrong))
    return lines


# --- what is left behind -----------------------------------------------------------------------------------------------


def table(records: Iterable[Record]) -> str:
    """As Markdown, which is readable in a terminal too."""
    lines = [
        "| method | seed | λ first → last | most growth | peak % | final % | drop |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for record in records:
        shown = largest(record)
        lines.append(
            f"| {record['method']} | {record['seed']} | {shown[0]:.3g} → {shown[-1]:.3g} | × {growth(record):.3g} "
            f"| {peak(record):.1f} | {final(record):.1f} | {drop(record):.1f} |"
        )
    return "\n".join(lines)


def thresholds() -> list[float]:
    """The λ above which SGD on the prototypes is unstable, epoch by epoch: it rises as the learning rate falls."""
    from oneround.data import load_dataset
    from oneround.learning.alignment import instability_threshold
    from oneround.learning.loop import learning_rate
    from oneround.models.encoders import encoders
    from oneround.reading import load

    recipe = load(EXPLODES, overrides(EXPLODES, 1).items())
    assert recipe.model.encoder is not None
    data, training = load_dataset(recipe.data), recipe.training
    features = encoders.of(recipe.model.encoder).build(data.shape[0]).features
    at_first = instability_threshold(recipe, data.classes, features)
    return [
        at_first * training.learning_rate / learning_rate(training, epoch / training.epochs)
        for epoch in range(training.epochs)
    ]


def draw(records: Sequence[Record], limits: Sequence[float], path: Path) -> None:
    """λ above, accuracy below, against epochs; a colour for each method, a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 6.4), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    told: set[str] = set()
    for record in reversed(records):  # V12 on top
        method = record["method"]
        style: dict[str, Any] = {"color": COLOURS[method], "linewidth": 1.4, "alpha": 0.85}
        label = None if method in told else LABELS[method]
        told.add(method)
        weights = largest(record)
        above.plot(range(1, len(weights) + 1), weights, label=label, **style)
        below.plot(
            [int(epoch) for epoch in record["accuracy"]],
            list(record["accuracy"].values()),
            marker="o",
            markersize=3,
            **style,
        )
    above.plot(range(1, len(limits) + 1), limits, "--", color="#666666", label="SGD on prototypes\nunstable above")
    above.set(yscale="log", ylabel="λ, raw\n(client with the largest at the end)", ylim=(1e-3, None))
    below.set(
        xlabel="local epochs before the one upload", ylabel="test accuracy of the fused\nmodel (IFFI), %", ylim=(0, 100)
    )
    for axes in (above, below):
        axes.grid(alpha=0.25)
    lines, names = above.get_legend_handles_labels()
    figure.legend(
        lines[-2::-1] + lines[-1:], names[-2::-1] + names[-1:], loc="outside right center", frameon=False, fontsize=9
    )
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(record["seed"] for record in records))
    figure.suptitle(f"Digits, 5 clients with 4 of 10 classes each, a line for each of the seeds {seeds}", fontsize=10)
    figure.savefig(path, dpi=150)


def write(records: Sequence[Record], out: Path, seconds: float, more: Mapping[str, Any]) -> None:
    """`explosion.png` and `explosion.json`."""
    from oneround.observe.environment import environment
    from oneround.site import choose_device

    limits = thresholds()
    draw(records, limits, out / "explosion.png")
    told: Mapping[str, Any] = {
        "claims": {"growth_at_least": GROWTH, "drop_at_least": FALL, "drop_at_most": CALM, "explodes": EXPLODES},
        "settings": {**SETTINGS, **more},
        "changes": CHANGES,
        "instability_threshold": limits,
        "runs": [
            {**record, "growth": growth(record), "peak": peak(record), "final": final(record), "drop": drop(record)}
            for record in records
        ],
        "broken": [text for record in records for text in broken(record)],
        "seconds": seconds,
        "environment": environment(choose_device(SETTINGS["local.device"])),
    }
    (out / "explosion.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def make_room(out: Path) -> None:
    """An empty folder: a new one, or this example's own from last time. Nothing else is ever removed."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file; choose another --out")
    if out.is_dir() and any(out.iterdir()):
        if not (out / MARK).is_file():
            raise ValueError(f"{out}: holds something that this example did not make; choose another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="of partition, initial weights and training"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="sets", help="change the settings"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/explosion"))
    options = parser.parse_args(arguments)
    from oneround.reading import parse_override

    more = dict(parse_override(text) for text in options.sets)
    try:
        make_room(options.out)
    except ValueError as error:
        parser.error(str(error))
    started = time.monotonic()
    records = measure_all(list(dict.fromkeys(options.seeds)), options.out, more)
    write(records, options.out, time.monotonic() - started, more)
    print(f"\n{table(records)}\n")
    judged = verdicts(records)
    for line, holds in judged:
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {line}")
    print(f"{options.out}/explosion.png and explosion.json, {time.monotonic() - started:.0f} s")
    return 0 if all(holds for _, holds in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
