"""FAFI (V4) against the public feature bank (V5), as source note 000 compared them, in two evaluation modes on the same uploads.

    python benchmarks/note_000.py --data cifar10 --data-dir data --minutes 9       # a part of it; run again to go on
    python benchmarks/note_000.py --methods V4 --out part_v4                       # one method, beside a process with the other
    python benchmarks/note_000.py --join part_v4.json part_v5.json --out results/cifar10_note_000
    python benchmarks/note_000.py --render results/cifar10_note_000.json           # the page again, from the record

The note's clients share samples (`dirichlet-overlap`); disjoint partitions are measured beside it. Both methods have the same
partition, seeds and public tenth. Uploads after 1, 11, 21 and 36 local epochs (the note's rounds 0, 10, 20, 35) are fused by IFFI and
scored twice:
    evaluation     batch norm uses the running statistics of training, as a deployed model does
    transductive   batch norm uses the statistics of the test batch: 256 shuffled test images, a short last batch joined to the one
                   before; running statistics stay as they are. The note's numbers were made this way.
Finished cells are not repeated: clients resume from their states in --runs, and OUT.json keeps its cells.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common import markdown_head, markdown_row
from oneround import acts
from oneround.analysis.statistics import Summary, paired
from oneround.analysis.terminal import format_difference
from oneround.config.load import load, parse_override
from oneround.config.recipe import Recipe
from oneround.data import Dataset, Images, load_dataset
from oneround.errors import OutOfTime
from oneround.global_model import GlobalModel
from oneround.models import Ensemble
from oneround.protocol import Broadcast, Upload
from oneround.seeds import generator
from oneround.server.plan import DealtPlan
from oneround.site import Site
from study import Cell, Record, Study, arguments, only_pages

METHODS = {"V4": "fafi", "V5": "bank"}
KINDS = {"dirichlet-overlap": "clients share samples", "dirichlet": "disjoint clients"}
ALPHAS = {"dirichlet-overlap": (0.5, 0.3, 0.1, 0.05), "dirichlet": (0.05, 0.5)}
KEYS = ("kind", "alpha", "partition", "method", "epoch")
EPOCHS = (1, 11, 21, 36)
BATCH = 256
MODES = ("evaluation", "transductive")
UNNORMALISED = "transductive, unnormalised"
CONTRASTS = {"V4": "cross-entropy · supervised-contrastive", "V5": "bank-contrastive · cross-entropy"}
NOTE: dict[float, tuple[tuple[float, float], ...]] = {
    0.5: ((46.21, 38.13), (76.59, 72.43), (83.47, 80.14), (87.07, 84.70)),
    0.3: ((43.16, 35.29), (74.55, 62.50), (81.92, 72.67), (86.02, 77.99)),
    0.1: ((41.18, 24.22), (70.36, 53.56), (78.39, 64.67), (83.73, 71.17)),
    0.05: ((42.17, 14.17), (70.82, 35.88), (79.11, 44.88), (83.67, 49.92)),
}
"""Accuracies of V4 and V5 that the note reports, by α, after each of EPOCHS."""


class Snapshots:
    """Trains the clients of a cell up to a snapshot and scores their uploads; the broadcast is made once for all snapshots."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.dataset: Dataset | None = None
        self.prepared: tuple[str, DealtPlan, Broadcast] | None = None

    def measure(self, cell: Cell, deadline: float) -> Record | None:
        """One snapshot, or None if the time is over before it is scored."""
        started = time.monotonic()
        plan, broadcast = self._prepare(recipe_of(cell, self.options))
        *names, epoch = cell
        folder = self.options.runs / "-".join([self.options.data, *map(str, names)])
        uploads: list[Upload] = []
        try:
            for client, number in plan.clients.items():
                images = plan.data.train.take(plan.split.clients[number])
                site = Site(client, images, folder / client, plan.recipe.local, deadline=deadline)
                uploads.append(acts.train(broadcast, site, until=epoch))
        except OutOfTime:
            return None
        last = epoch == broadcast.last_epoch
        accuracies = score(uploads, broadcast, plan.data.test, plan.server(), plan.recipe.seeds.partition, last)
        if last:
            shutil.rmtree(folder, ignore_errors=True)
        return {
            "accuracy": accuracies, "cosine": cosines(uploads, cell), "digest": plan.split.digest, "sizes": plan.split.sizes,
            "shared_samples": plan.split.shared, "stopped": [upload.stopped for upload in uploads if upload.stopped],
            "seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip

    def _prepare(self, recipe: Recipe) -> tuple[DealtPlan, Broadcast]:
        self.dataset = self.dataset or load_dataset(recipe.data, recipe.local.data_path)
        if self.prepared is None or self.prepared[0] != recipe.digest:
            plan = DealtPlan.of(recipe, self.dataset)
            self.prepared = recipe.digest, plan, plan.prepare()
        return self.prepared[1:]


def recipe_of(cell: Cell, options: argparse.Namespace) -> Recipe:
    """The preset of the method; everything else is the same for both. Gradients are traced after the first and last epoch."""
    kind, alpha, seed, method, _ = cell
    overrides: dict[str, Any] = {
        "data.kind": options.data, "local.data_path": options.data_dir, "partition.kind": kind, "partition.alpha": alpha,
        "public": 0.1, "training.epochs": max(options.epochs), "fusion": ["iffi"], "trace.every": 10**9,
        **{f"seeds.{purpose}": seed for purpose in ("partition", "initialisation", "training")},
    }  # fmt: skip
    return load(METHODS[method], [*overrides.items(), *(parse_override(text) for text in options.sets)])


def cosines(uploads: Sequence[Upload], cell: Cell) -> list[float]:
    """Of every client: cosine of the gradients of cross-entropy and the contrastive term at the features, where it was traced."""
    *_, method, epoch = cell
    traces = [upload.history[epoch - 1].get("gradients") for upload in uploads if len(upload.history) >= epoch]
    return [trace["features"]["cosine"][CONTRASTS[method]] for trace in traces if trace is not None]


# --- scoring -------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def score(
    uploads: Sequence[Upload], broadcast: Broadcast, test: Images, server: Site, seed: int, last: bool
) -> dict[str, float]:
    """Accuracy of the fused uploads by mode; of the last snapshot also on unnormalised test images, as the note's code fed them."""
    with server.arithmetic(sum(tensor.numel() for tensor in broadcast.weights.values())):
        model = acts.fuse(uploads, broadcast, server)
        assert isinstance(model.inference, Ensemble)
        model.inference.load_experts()
        shuffled = test.take(torch.randperm(len(test), generator=generator(seed, "test batches")))
        accuracies = {"evaluation": accuracy(model, test, server.device)}
        use_batch_statistics(model)
        accuracies["transductive"] = accuracy(model, shuffled, server.device)
        if last:
            model.mean, model.std = 0.0, 1.0
            accuracies[UNNORMALISED] = accuracy(model, shuffled, server.device)
    return accuracies


def use_batch_statistics(model: nn.Module) -> None:
    """Let batch norm normalise by the batch it sees; without running statistics there are none to move."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = None


def accuracy(model: GlobalModel, images: Images, device: torch.device) -> float:
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for pixels, labels in batches_of(images, BATCH):
        scores = model(pixels.to(device).float() / 255)
        correct += (scores.argmax(1) == labels.to(device)).sum()
    return int(correct) / len(images)


def batches_of(images: Images, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of `size` in the order given; a short last one is joined to the one before."""
    starts = [start for start in range(0, len(images), size) if start == 0 or start + size <= len(images)]
    for start, end in zip(starts, [*starts[1:], len(images)], strict=True):
        yield images.pixels[start:end], images.labels[start:end]


# --- the page --------------------------------------------------------------------------------------------------------------


class Pairs:
    """The record by cell: accuracies of both methods on the partitions they share."""

    def __init__(self, record: Record) -> None:
        self.entries = {tuple(entry[key] for key in KEYS): entry for entry in record["cells"]}
        self.epochs: list[int] = record["epochs"]

    def alphas(self, kind: str) -> list[float]:
        """Those with at least one pair."""
        present = dict.fromkeys(alpha for each, alpha, *_ in self.entries if each == kind)
        return sorted((alpha for alpha in present if self.partitions(kind, alpha, self.epochs[0])), reverse=True)

    def partitions(self, kind: str, alpha: float, epoch: int) -> list[int]:
        """Partitions on which both methods are measured; they must be the same partitions."""
        shared = []
        for seed in sorted({key[2] for key in self.entries}):
            pair = [self.entries.get((kind, alpha, seed, method, epoch)) for method in METHODS]
            if all(pair):
                digests = {entry["digest"] for entry in pair if entry}
                assert len(digests) == 1, f"{kind}, alpha {alpha}, partition {seed}: V4 and V5 saw different partitions"
                shared.append(seed)
        return shared

    def accuracies(self, kind: str, alpha: float, epoch: int, mode: str, method: str) -> list[float]:
        """In percent, by partition."""
        seeds = self.partitions(kind, alpha, epoch)
        return [100 * self.entries[kind, alpha, seed, method, epoch]["accuracy"][mode] for seed in seeds]

    def difference(self, kind: str, alpha: float, epoch: int, mode: str) -> Summary | None:
        """V5 minus V4."""
        v4, v5 = (self.accuracies(kind, alpha, epoch, mode, method) for method in ("V4", "V5"))
        return paired(v5, v4) if v4 else None

    def below(self, kind: str, mode: str) -> str:
        """In how many combinations of α and snapshot the mean of V5 is below that of V4."""
        differences = [
            self.difference(kind, alpha, epoch, mode) for alpha in self.alphas(kind) for epoch in self.epochs
        ]
        measured = [difference for difference in differences if difference is not None]
        return f"{sum(difference.mean < 0 for difference in measured)} of {len(measured)} combinations"

    def change_of_mode(self, kind: str, alpha: float, epoch: int, method: str, of: str, minus: str) -> Summary:
        return paired(*(self.accuracies(kind, alpha, epoch, mode, method) for mode in (of, minus)))


def page(record: Record) -> list[str]:
    pairs = Pairs(record)
    kinds = [kind for kind in KINDS if pairs.alphas(kind)]
    lines = [f"# V4 (`fafi`) against V5 (`bank`), source note 000, on {record['data']}", ""]
    lines += [_summary(pairs, kinds), ""]
    lines += [
        "Five clients, one upload each, fused by IFFI; the server keeps the same tenth of the images in both methods. Test accuracy in %, mean",
        "(each partition); differences are V5 − V4 on the same partition and seeds, mean ± 95 % interval (each partition), not corrected for",
        "the number of comparisons. n.d.: not distinguishable, the interval contains 0. Two partitions give very wide intervals and one gives none.",
        "*Evaluation*: batch norm on running statistics. *Transductive*: batch norm on the statistics",
        f"of the test batch, {record['batch']} shuffled test images; it needs batches with many classes in them. Training is the presets' own:",
        "views drawn per sample, incomplete batches filled up, where the note's code drew once per batch and dropped them.",
        *_unpaired(pairs),
        "",
    ]
    for kind in kinds:
        lines += [f"## {KINDS[kind].capitalize()} (`{kind}`)", ""]
        for mode in MODES:
            lines += [f"### {mode.capitalize()}", "", *_table(pairs, kind, mode), ""]
    lines += ["## What the mode changes after the last epoch", "", *_modes(pairs, kinds), ""]
    lines += ["## Do the gradients pull against each other?", "", *_gradients(pairs, kinds), ""]
    return lines


def _summary(pairs: Pairs, kinds: Sequence[str]) -> str:
    """What it shows, in one paragraph."""
    last, sentences = pairs.epochs[-1], [_lead(pairs, kinds)]
    for kind in kinds:
        by_mode = []
        for mode in MODES:
            each = [
                f"{_interval(difference)} at α = {alpha:g}"
                for alpha in pairs.alphas(kind)
                if (difference := pairs.difference(kind, alpha, last, mode)) is not None
            ]
            by_mode.append(f"{mode}: {', '.join(each) or 'not measured'}")
        sentences.append(f"{KINDS[kind].capitalize()}, V5 − V4 after {last} local epochs, {'; '.join(by_mode)}.")
        if kind == "dirichlet-overlap" and pairs.epochs == [*EPOCHS]:
            noted = [f"{v5 - v4:+.1f} at α = {alpha:g}" for alpha, (*_, (v4, v5)) in NOTE.items()]
            sentences.append(
                f"The note, transductive and with V4 and V5 on different partitions, has {', '.join(noted)}."
            )
        counts = [f"{pairs.below(kind, mode)} ({mode})" for mode in MODES]
        sentences.append(f"Over all α and snapshots the mean of V5 is below that of V4 in {' and '.join(counts)}.")
    sentences.append(_late_training(pairs, kinds))
    sentences.append(_angles(pairs))
    return " ".join(filter(None, sentences))


def _lead(pairs: Pairs, kinds: Sequence[str]) -> str:
    """Ours against the note's, in its own mode and kind of partition, at the largest and smallest α."""
    if "dirichlet-overlap" not in kinds or pairs.epochs != [*EPOCHS]:
        return ""
    compared = []
    for alpha in (max(NOTE), min(NOTE)):
        ours, (v4, v5) = pairs.difference("dirichlet-overlap", alpha, EPOCHS[-1], "transductive"), NOTE[alpha][-1]
        if ours is not None:
            compared.append(f"{ours.mean:+.1f} points at α = {alpha:g} (the note: {v5 - v4:+.1f})")
    return (
        f"**Scored as in the note, on its kind of partition, V5 − V4 is {' and '.join(compared)}.**" if compared else ""
    )


def _unpaired(pairs: Pairs) -> list[str]:
    """Snapshots of one method whose counterpart is missing; no table has them."""
    unpaired = [
        f"{method} on {kind}, α = {alpha:g}, partition {seed}, epoch {epoch}"
        for kind, alpha, seed, method, epoch in pairs.entries
        if seed not in pairs.partitions(kind, alpha, epoch)
    ]
    return [f"In the record without a counterpart, and in no table: {'; '.join(unpaired)}."] if unpaired else []


def _interval(difference: Summary) -> str:
    if difference.margin is None:
        return f"{difference.mean:+.1f} (one partition, no interval)"
    verdict = "" if difference.distinguishable else ", not distinguishable"
    return f"{difference.mean:+.1f} ± {difference.margin:.1f} ({len(difference.values)} partitions{verdict})"


def _late_training(pairs: Pairs, kinds: Sequence[str]) -> str:
    """How the transductive gap changes from the first to the last snapshot."""
    changes, first, last = [], pairs.epochs[0], pairs.epochs[-1]
    for alpha in pairs.alphas("dirichlet-overlap") if "dirichlet-overlap" in kinds else ():
        early, late = (pairs.difference("dirichlet-overlap", alpha, epoch, "transductive") for epoch in (first, last))
        if early is not None and late is not None:
            changes.append(f"{early.mean:+.1f} to {late.mean:+.1f} at α = {alpha:g}")
    if not changes:
        return ""
    return (
        f"Where clients share samples the transductive gap goes from epoch {first} to {last} from {', '.join(changes)}."
    )


def _angles(pairs: Pairs) -> str:
    """The range of the traced cosines."""
    values = {
        method: [value for key, entry in pairs.entries.items() if key[3] == method for value in entry["cosine"]]
        for method in METHODS
    }
    if not all(values.values()):
        return ""
    ranges = [f"{min(each):+.2f} and {max(each):+.2f} in {method}" for method, each in values.items()]
    negative = sum(value < 0 for value in values["V5"])
    return (
        f"Gradients of cross-entropy and of the contrastive term have a cosine between {', between '.join(ranges)}; "
        f"{negative or 'none'} of {len(values['V5'])} traced in V5 {'are' if negative > 1 else 'is'} negative."
    )


def _table(pairs: Pairs, kind: str, mode: str) -> list[str]:
    noted = kind == "dirichlet-overlap"
    heads = ["α", "local epochs", "V4", "V5", "V5 − V4", *(["note: V4", "note: V5", "note: V5 − V4"] if noted else [])]
    lines = markdown_head(heads)
    for alpha in pairs.alphas(kind):
        for epoch in pairs.epochs:
            difference = pairs.difference(kind, alpha, epoch, mode)
            if difference is None:
                continue
            row = [f"{alpha:g}", str(epoch)]
            row += [_each(pairs.accuracies(kind, alpha, epoch, mode, method)) for method in METHODS]
            row.append(_signed(difference))
            if noted:
                row += _noted(alpha, epoch)
            lines.append(markdown_row(row))
    return lines


def _noted(alpha: float, epoch: int) -> list[str]:
    if alpha not in NOTE or epoch not in EPOCHS:
        return ["", "", ""]
    v4, v5 = NOTE[alpha][EPOCHS.index(epoch)]
    return [f"{v4:.2f}", f"{v5:.2f}", f"{v5 - v4:+.2f}"]


def _each(values: Sequence[float]) -> str:
    each = f" ({' '.join(f'{value:.1f}' for value in values)})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{each}"


def _signed(difference: Summary) -> str:
    each = f" ({' '.join(f'{value:+.1f}' for value in difference.values)})" if len(difference.values) > 1 else ""
    return format_difference(difference) + each


def _modes(pairs: Pairs, kinds: Sequence[str]) -> list[str]:
    """Transductive minus evaluation on the same uploads, and what leaving test images unnormalised adds."""
    last = pairs.epochs[-1]
    heads = [
        "partitions", "α", *(f"{method}: transductive − evaluation" for method in METHODS),
        *(f"{method}: unnormalised − normalised test images, transductive" for method in METHODS),
    ]  # fmt: skip
    lines = markdown_head(heads)
    for kind in kinds:
        for alpha in pairs.alphas(kind):
            if not pairs.partitions(kind, alpha, last):
                continue
            row = [KINDS[kind], f"{alpha:g}"]
            for of, minus in (("transductive", "evaluation"), (UNNORMALISED, "transductive")):
                row += [_signed(pairs.change_of_mode(kind, alpha, last, method, of, minus)) for method in METHODS]
            lines.append(markdown_row(row))
    return lines


def _gradients(pairs: Pairs, kinds: Sequence[str]) -> list[str]:
    """Cosines between cross-entropy and the contrastive term, of all clients and partitions."""
    lines = [
        "Cosine of the gradients of cross-entropy and of the contrastive term (V4: SupCon, V5: SupCon with the bank) at the features of an",
        "epoch's last batch: mean (lowest to highest) over clients and partitions. Negative: they pull against each other; 0: orthogonal.",
        "",
        *markdown_head(["partitions", "α", "local epochs", *METHODS]),
    ]
    for kind in kinds:
        for alpha in pairs.alphas(kind):
            for epoch in pairs.epochs:
                seeds = pairs.partitions(kind, alpha, epoch)
                values = {
                    method: [
                        value for seed in seeds for value in pairs.entries[kind, alpha, seed, method, epoch]["cosine"]
                    ]
                    for method in METHODS
                }
                if all(values.values()):
                    row = [
                        f"{statistics.mean(each):+.2f} ({min(each):+.2f} to {max(each):+.2f})"
                        for each in values.values()
                    ]
                    lines.append(markdown_row([KINDS[kind], f"{alpha:g}", str(epoch), *row]))
    return lines


# --- the command -----------------------------------------------------------------------------------------------------------


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Overlapping clients on the first two partitions, then disjoint ones; further partitions one by one, the cheapest α first."""
    overlap, disjoint = ("dirichlet-overlap", "dirichlet")
    first, further = options.partitions[:2], options.partitions[2:]
    runs = [(overlap, alpha, seed) for seed in first for alpha in ALPHAS[overlap]]
    runs += [(disjoint, alpha, seed) for seed in first for alpha in ALPHAS[disjoint]]
    for seed in further:
        runs += [(disjoint, alpha, seed) for alpha in ALPHAS[disjoint]]
        runs += [(overlap, alpha, seed) for alpha in sorted(ALPHAS[overlap])]
    return [
        (kind, alpha, seed, method, epoch)
        for kind, alpha, seed in runs
        if kind in options.kinds and (not options.alphas or alpha in options.alphas)
        for method in options.methods
        for epoch in options.epochs
    ]


def main() -> None:
    parser = arguments(__doc__, "note_000")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--alphas", type=float, nargs="+", help="only these of the α of every kind")
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epochs", type=int, nargs="+", default=list(EPOCHS), help="snapshots; the last ends training")
    options = parser.parse_args()
    if only_pages(options, KEYS, page):
        return
    study = Study(options, KEYS, {"data": options.data, "epochs": options.epochs, "batch": BATCH}, page)
    study.measure_missing(cells_of(options), Snapshots(options).measure, summary_of)


def summary_of(entry: Record) -> str:
    scores = ", ".join(f"{mode} {100 * value:.1f}" for mode, value in entry["accuracy"].items())
    return f"{scores} ({entry['seconds']:.0f} s)"


if __name__ == "__main__":
    main()
