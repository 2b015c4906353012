"""V4 and V5 on the same partitions, for source note 000: from the record of `oneround reproduce note-000`, or the older one of snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oneround.analysis.statistics import Summary, paired
from oneround.evaluate import TRANSDUCTIVE
from oneround.runs.archive import find_runs
from oneround.runs.record import RunRecord
from oneround.studies.named_study import read_study
from oneround.studies.outcome import EVALUATION, MODES

METHODS = {"V4": "fafi", "V5": "bank"}
KINDS = {"dirichlet-overlap": "shared", "dirichlet": "disjoint"}
"""Partition → how the study calls it."""
EPOCHS = (1, 11, 21, 36)
"""Those of the note's rounds 0, 10, 20 and 35."""
CONTRASTS = {"V4": "cross-entropy · supervised-contrastive", "V5": "bank-contrastive · cross-entropy"}

Key = tuple[str, float, int, str, int]
"""Kind of partition, α, partition seed, method, epoch."""


def noted(alpha: float, epoch: int) -> tuple[float, float]:
    """The note's accuracies of V4 and V5."""
    by_method = read_study("note-000").note[f"{KINDS['dirichlet-overlap']}, α = {alpha:g}"]
    v4, v5 = (by_epoch[epoch] for method in METHODS if isinstance(by_epoch := by_method[method], dict))
    return v4, v5


class Pairs:
    """A record by key: accuracies of both methods on the partitions they share."""

    def __init__(self, file: Path) -> None:
        content = json.loads(file.read_text(encoding="utf-8"))
        if "cells" in content:
            keys = ("kind", "alpha", "partition", "method", "epoch")
            self.entries = {tuple(cell[key] for key in keys): cell for cell in content["cells"]}
        else:
            self.entries = dict(entry for run in find_runs([file]) for entry in _entries(run))

    def alphas(self, kind: str) -> list[float]:
        """Those with at least one pair."""
        present = dict.fromkeys(alpha for each, alpha, *_ in self.entries if each == kind)
        return sorted((alpha for alpha in present if self.partitions(kind, alpha, EPOCHS[0])), reverse=True)

    def partitions(self, kind: str, alpha: float, epoch: int) -> list[int]:
        """Partitions on which both methods are measured; they must be the same partitions."""
        shared = []
        for seed in sorted({key[2] for key in self.entries}):
            pair = [self.entries.get((kind, alpha, seed, method, epoch)) for method in METHODS]
            if all(pair):
                digests = {entry["digest"] for entry in pair if entry}
                assert len(digests) == 1, f"{kind}, α = {alpha}, partition {seed}: V4 and V5 saw different partitions"
                shared.append(seed)
        return shared

    def accuracies(self, kind: str, alpha: float, epoch: int, mode: str, method: str) -> list[float]:
        """In percent, by partition."""
        seeds = self.partitions(kind, alpha, epoch)
        return [100 * self.entries[kind, alpha, seed, method, epoch]["accuracy"][mode] for seed in seeds]

    def difference(self, kind: str, alpha: float, epoch: int, mode: str) -> Summary | None:
        """V5 minus V4."""
        v4, v5 = (self.accuracies(kind, alpha, epoch, mode, method) for method in METHODS)
        return paired(v5, v4) if v4 else None

    def below(self, kind: str, mode: str) -> str:
        """In how many combinations of α and snapshot the mean of V5 is below that of V4."""
        differences = [self.difference(kind, alpha, epoch, mode) for alpha in self.alphas(kind) for epoch in EPOCHS]
        measured = [difference for difference in differences if difference is not None]
        return f"{sum(difference.mean < 0 for difference in measured)} of {len(measured)} combinations"

    def seconds(self, method: str) -> float:
        """Of a method on partition 1 at every α of overlapping clients."""
        return sum(
            entry["seconds"]
            for (kind, _, seed, each, _), entry in self.entries.items()
            if (kind, seed, each) == ("dirichlet-overlap", 1, method)
        )


def _entries(run: RunRecord) -> Iterator[tuple[Key, dict[str, Any]]]:
    """The snapshots of a run."""
    method = next(name for name, preset in METHODS.items() if preset == run.method)
    curves = {EVALUATION: run.curves["iffi"], TRANSDUCTIVE: run.curves[f"iffi, {TRANSDUCTIVE}"]}
    cosines = run.cosines().get((CONTRASTS[method], "features"), {})
    kind, alpha = str(run.keys["partition.kind"]), float(run.keys["partition.alpha"])
    for epoch in EPOCHS:
        yield (
            (kind, alpha, run.partition_seed, method, epoch),
            {
                "accuracy": {mode: curves[mode][epoch] for mode in MODES},
                "cosine": [by_epoch[epoch] for by_epoch in cosines.values() if epoch in by_epoch],
                "digest": run.partition_digest,
                "seconds": (run.seconds or 0.0) if epoch == EPOCHS[-1] else 0.0,
            },
        )
