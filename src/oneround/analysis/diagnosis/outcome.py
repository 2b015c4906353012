"""Rules about the partition, and about the fused model compared with earlier snapshots and with local models."""

from __future__ import annotations

import math
from collections.abc import Iterator

from oneround.analysis.diagnosis.rules import Finding, run_rule
from oneround.evaluate import is_transductive
from oneround.formatting import plural
from oneround.runs.log import best_epoch
from oneround.runs.record import RunRecord

PAST_PEAK = 3.0  # points: more than a snapshot's accuracy jitters from epoch to epoch
PLAIN_MEANS = ("iffi", "informative-iffi", "average")  # rules that average the prototypes of a class over all clients


def _no_counts(run: RunRecord) -> str:
    return "" if run.counts else "no partition.json"


@run_rule("prototype-never-trained", _no_counts)
def prototype_never_trained(run: RunRecord) -> Iterator[Finding]:
    """Classes that no client holds; and untrained prototypes that plain averaging includes."""
    holders = [sum(count > 0 for count in column) for column in zip(*run.counts.values(), strict=True)]
    names = run.class_names or [str(label) for label in range(len(holders))]
    orphans = [name for name, count in zip(names, holders, strict=True) if count == 0]
    if orphans:
        listed = ", ".join(orphans[:10]) + (f" and {len(orphans) - 10} more" if len(orphans) > 10 else "")
        evidence = f"{len(orphans)} of {len(holders)} classes have no training sample at any client: {listed}"
        advice = "no fusion rule can recognise a class that no client holds: check the partition (oneround partition) or the data"
        yield Finding("problem", None, float(len(orphans)), 0.0, evidence, advice, "no client")
    absent = sum(len(run.counts) - count for count in holders if count)
    if absent and run.recipe.fusion[0].kind in PLAIN_MEANS:
        pairs = len(run.counts) * len(holders)
        evidence = (
            f"in {absent} of {pairs} (client, class) pairs the client holds no sample of a class others hold, and {run.main_rule} "
            "averages its untrained prototype with theirs"
        )
        advice = "compare with a rule that weighs clients by how well they know an image (typicality-gated, entropy-gated): oneround fuse RUN --rule all"
        yield Finding("note", None, float(absent), 0.0, evidence, advice, "plain mean")


@run_rule("shared-data", lambda run: "" if run.partition else "no partition.json")
def shared_data(run: RunRecord) -> Iterator[Finding]:
    """Samples that several clients hold."""
    shared = run.partition["shared_samples"]
    if shared:
        evidence = f"{shared:,} training images are held by more than one client"
        advice = "do not compare these accuracies with those of disjoint partitions; partition.kind = dirichlet deals every sample once"
        yield Finding("warning", None, float(shared), 0.0, evidence, advice)


def _few_snapshots(run: RunRecord) -> str:
    return "" if len(run.curves.get(run.main_rule, {})) > 1 else "fewer than two snapshots (snapshots)"


@run_rule("past-its-peak", _few_snapshots)
def past_its_peak(run: RunRecord) -> Iterator[Finding]:
    """The fused model was better at an earlier snapshot, on the validation images where there are some."""
    chosen = run.validation.get(run.main_rule, {})
    curve = chosen or run.curves[run.main_rule]
    last, best = max(curve), best_epoch(curve)
    lost = round(100 * (curve[best] - curve[last]), 6)
    if lost < PAST_PEAK:
        return
    where = "on validation data" if chosen else "seen on test data"
    evidence = (
        f"{run.main_rule} had {100 * curve[best]:.1f} % at epoch {best} and has {100 * curve[last]:.1f} % at epoch {last}, "
        f"{lost:.1f} points less ({where})"
    )
    advice = (
        f"train {plural(best, 'epoch')} (--epochs {best}; not the same run where s, stages or the learning rate depend on the number of epochs), "
        "or find what drives accuracy down"
    )
    if not chosen:
        advice = f"train less (about {plural(best, 'epoch')}), or find what drives accuracy down; choose the epoch on validation data: --set validation=0.1"
    yield Finding("warning", last, lost, PAST_PEAK, evidence, advice)


def _noise(accuracy: float, tested: int) -> float:
    """Two standard errors of the difference of two accuracies on so many test images: by that much they may differ by chance."""
    return 2 * math.sqrt(2 * accuracy * (1 - accuracy) / tested) if tested else 0.0


def _not_at_the_end(run: RunRecord) -> str:
    local, end = run.measurements.local_accuracy.values(), run.recipe.epochs
    scored = end in run.curves.get(run.main_rule, {}) and any(end in by_epoch for by_epoch in local)
    return "" if scored else "not scored at the end of training"  # earlier, networks that know little often fuse badly


@run_rule("fusion-worse-than-best-client", _not_at_the_end)
def fusion_worse_than_best_client(run: RunRecord) -> Iterator[Finding]:
    """One client alone beats the fused model."""
    end = run.recipe.epochs
    fused = {name: curve[end] for name, curve in run.curves.items() if end in curve and not is_transductive(name)}
    local = {client: by[end] for client, by in run.measurements.local_accuracy.items() if end in by}
    best, better = max(local, key=lambda client: local[client]), max(fused, key=lambda name: fused[name])
    if fused[run.main_rule] < local[best] - _noise(local[best], sum(run.test_counts)):
        evidence = f"{run.main_rule} has {100 * fused[run.main_rule]:.1f} %, {best} alone {100 * local[best]:.1f} %"
        advice = "try other rules on the same uploads: oneround fuse RUN --rule all"
        if fused[better] > local[best]:
            advice = f"{better} has {100 * fused[better]:.1f} % on the same uploads: put it first in fusion"
        yield Finding("problem", end, fused[run.main_rule], local[best], evidence, advice)
