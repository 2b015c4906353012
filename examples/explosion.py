"""Why λ explodes, on the embedded digits: V12 against its four cures, three seeds each, in about a minute on two cores.

    python examples/explosion.py
    python examples/explosion.py --seeds 1 2 3 --out runs/explosion
    python examples/explosion.py --seeds 3 --set training.batch_size=16        # any recipe key, for all methods

V12 (`etf-attenuated`) learns λ from a loss that a falling factor s enters, and answers by learning a larger and larger λ:
prototypes are dragged to their anchors while gradient clipping leaves next to nothing for the encoder, and the fused model
falls far below its own peak. The cures bound λ (`etf-guarded`, `etf-hinge`), put s where it relaxes λ (`etf-decaying`), or
compute λ instead of learning it (`etf-equilibrium`). docs/why-lambda-explodes.md has the derivation.

Everything lands in --out: `explosion.png`, a run folder for each method and seed, and a record of all of them for
`oneround compare OUT/explosion.json --layout peaks`. Test accuracy is looked
at to draw curves only; nothing is chosen by it in a run. Exit code 1: one of the claims does not hold.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oneround.runs.record import RunRecord

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

# --- one run -----------------------------------------------------------------------------------------------------------


def overrides(method: str, seed: int) -> dict[str, Any]:
    """What is changed in a preset."""
    seeds = {f"seeds.{kind}": seed for kind in ("partition", "initialisation", "training")}
    return SETTINGS | CHANGES[method] | seeds


def measure(method: str, seed: int, folder: Path, more: Mapping[str, Any]) -> tuple[float, list[str]]:
    """Run one method on one seed: seconds it took, and what the safeguards reported."""
    from oneround.config.load import load
    from oneround.simulate import run

    warnings: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "trouble":
            warnings.append(event["text"])

    started = time.monotonic()
    run(load(method, (overrides(method, seed) | dict(more)).items()), folder, emit=listen)
    return time.monotonic() - started, warnings


def measure_all(seeds: Sequence[int], out: Path, more: Mapping[str, Any]) -> list[RunRecord]:
    """Every method on every seed, two runs at a time, reported as they finish; in the order of the methods."""
    from oneround.runs.archive import find_runs

    folders = {(method, seed): out / f"{method}-{seed}" for method in CHANGES for seed in seeds}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(measure, *cell, folder, more): folder for cell, folder in folders.items()}
        for number, done in enumerate(as_completed(waiting), 1):
            seconds, warnings = done.result()
            (run,) = find_runs([waiting[done]])
            print(f"[{number}/{len(folders)}] {in_words(run)} ({seconds:.0f} s)", flush=True)
            for text in warnings:
                print(f"    {text.partition(';')[0]}", flush=True)
    return find_runs(folders.values())


# --- what a run shows --------------------------------------------------------------------------------------------------


def weights(run: RunRecord) -> list[list[float]]:
    """Raw λ of every client, epoch by epoch."""
    return [list(by.values()) for by in run.trace("lambda_raw").values()]


def largest(run: RunRecord) -> list[float]:
    """λ of the client whose λ is largest at the end."""
    return max(weights(run), key=lambda values: values[-1])


def growth(run: RunRecord) -> float:
    """The most that a client's λ grew from its first to its last epoch, as a factor."""
    return max(values[-1] / values[0] for values in weights(run))


def accuracy(run: RunRecord) -> dict[int, float]:
    """Of the fused model, in percent, at every snapshot."""
    return {epoch: 100 * value for epoch, value in run.curves["iffi"].items()}


def peak(run: RunRecord) -> float:
    return max(accuracy(run).values())


def final(run: RunRecord) -> float:
    """Accuracy after the last epoch."""
    return accuracy(run)[max(accuracy(run))]


def drop(run: RunRecord) -> float:
    """Points from the peak to the end."""
    return peak(run) - final(run)


def in_words(run: RunRecord) -> str:
    return f"{run.method}, seed {run.partition_seed}: {final(run):.1f} %, peak {peak(run):.1f} %"


# --- the claims --------------------------------------------------------------------------------------------------------


def broken(run: RunRecord) -> list[str]:
    """The claims that this run does not bear out, in words."""
    where = f"{run.method}, seed {run.partition_seed}"
    if not all(map(math.isfinite, (growth(run), drop(run)))):
        return [f"{where}: figures are not finite"]
    if run.method != EXPLODES:
        return [] if drop(run) <= CALM else [f"{where}: ends {drop(run):.1f} points below its peak, not ≤ {CALM:g}"]
    wrong = []
    if growth(run) < GROWTH:
        wrong.append(f"{where}: λ grows × {growth(run):.3g}, not ≥ {GROWTH:g}")
    if drop(run) < FALL:
        wrong.append(f"{where}: ends {drop(run):.1f} points below its peak, not ≥ {FALL:g}")
    return wrong


def verdicts(runs: Iterable[RunRecord]) -> list[tuple[str, bool]]:
    """A line for each method, and whether its claim holds on every seed."""
    by_method: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    lines = []
    for method, mine in by_method.items():
        wrong = [text for run in mine for text in broken(run)]
        falls = ", ".join(f"{drop(run):.1f}" for run in mine)
        claim = f"λ × ≥ {GROWTH:g} and a fall of ≥ {FALL:g}" if method == EXPLODES else f"a fall of ≤ {CALM:g}"
        lines.append((f"{LABELS[method]}: ends {falls} points below its peaks; claimed: {claim}", not wrong))
    return lines


# --- what is left behind -----------------------------------------------------------------------------------------------


def thresholds() -> list[float]:
    """The λ above which SGD on the prototypes is unstable, epoch by epoch: it rises as the learning rate falls."""
    from oneround.config.load import load
    from oneround.data import load_dataset
    from oneround.models.encoders import encoders
    from oneround.training.alignment.aligner import instability_threshold
    from oneround.training.loop import learning_rate

    recipe = load(EXPLODES, overrides(EXPLODES, 1).items())
    assert recipe.model.encoder is not None
    data, training = load_dataset(recipe.data), recipe.training
    features = encoders.of(recipe.model.encoder).build(data.shape[0]).features
    at_first = instability_threshold(recipe, data.classes, features)
    return [
        at_first * training.learning_rate / learning_rate(training, epoch, training.epochs)
        for epoch in range(training.epochs)
    ]


def draw(runs: Sequence[RunRecord], limits: Sequence[float], path: Path) -> None:
    """λ above, accuracy below, against epochs; a colour for each method, a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 6.4), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    labelled: set[str] = set()
    for run in reversed(runs):  # V12 on top
        method = run.method
        style: dict[str, Any] = {"color": COLOURS[method], "linewidth": 1.4, "alpha": 0.85}
        label = None if method in labelled else LABELS[method]
        labelled.add(method)
        values, curve = largest(run), accuracy(run)
        above.plot(range(1, len(values) + 1), values, label=label, **style)
        below.plot(list(curve), list(curve.values()), marker="o", markersize=3, **style)
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
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(run.partition_seed for run in runs))
    figure.suptitle(f"Digits, 5 clients with 4 of 10 classes each, a line for each of the seeds {seeds}", fontsize=10)
    figure.savefig(path, dpi=150)


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
    from oneround.analysis.comparison import compare
    from oneround.analysis.tables import peaks_sheet
    from oneround.config.load import parse_override
    from oneround.runs.archive import keep

    more = dict(parse_override(text) for text in options.sets)
    try:
        make_room(options.out)
    except ValueError as error:
        parser.error(str(error))
    started = time.monotonic()
    runs = measure_all(list(dict.fromkeys(options.seeds)), options.out, more)
    keep(runs, options.out / "explosion.json")
    draw(runs, thresholds(), options.out / "explosion.png")
    print(f"\n{peaks_sheet(compare(runs)[0]).markdown()}\n")
    judged = verdicts(runs)
    for line, holds in judged:
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {line}")
    print(f"{options.out}/explosion.png and explosion.json, {time.monotonic() - started:.0f} s")
    return 0 if all(holds for _, holds in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
