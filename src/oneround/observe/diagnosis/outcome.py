"""Rules about who holds what, and what the fused model makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from oneround.observe.diagnosis.run import Run, Sign, run_rule

PAST_PEAK = 3.0  # points: more than a snapshot's accuracy jitters from epoch to epoch
PLAIN_MEANS = ("iffi", "informative-iffi", "average")  # rules that average every client's prototype of a class alike


def _no_counts(run: Run) -> str:
    return "" if run.counts else "no partition.json"


@run_rule("prototype-never-trained", _no_counts)
def prototype_never_trained(run: Run) -> Iterator[Sign]:
    """Classes nobody holds; and what plain averaging of prototypes takes in from clients that never saw a class."""
    holders = [sum(count > 0 for count in column) for column in zip(*run.counts.values(), strict=True)]
    names = run.class_names or [str(label) for label in range(len(holders))]
    orphans = [name for name, count in zip(names, holders, strict=True) if count == 0]
    if orphans:
        shown = ", ".join(orphans[:10]) + (f" and {len(orphans) - 10} more" if len(orphans) > 10 else "")
        evidence = f"{len(orphans)} of {len(holders)} classes have no training sample at any client: {shown}"
        advice = "no fusion can tell what nobody saw: check the partition (oneround partition) or the data"
        yield Sign("problem", None, float(len(orphans)), 0.0, evidence, advice, "no client")
    absent = sum(len(run.counts) - count for count in holders if count)
    if absent and run.recipe.fusion[0].kind in PLAIN_MEANS:
        pairs = len(run.counts) * len(holders)
        evidence = (
            f"in {absent} of {pairs} (client, class) pairs the client holds no sample of a class others hold, and {run.main_rule} "
            "averages its untaught prototype in with theirs"
        )
        advice = "compare with a rule that asks who knows a class (typicality-gated, entropy-gated): oneround fuse RUN --rule all"
        yield Sign("note", None, float(absent), 0.0, evidence, advice, "plain mean")


@run_rule("shared-data", lambda run: "" if run.shared is not None else "no partition.json")
def shared_data(run: Run) -> Iterator[Sign]:
    """Samples that more than one client holds."""
    if run.shared:
        evidence = f"{run.shared:,} training images are held by more than one client"
        advice = "do not compare these accuracies with those of disjoint partitions; partition.kind = dirichlet deals every sample once"
        yield Sign("warning", None, float(run.shared), 0.0, evidence, advice)


def _few_snapshots(run: Run) -> str:
    return "" if len(run.curves.get(run.main_rule, {})) > 1 else "fewer than two snapshots (snapshots)"


@run_rule("past-its-peak", _few_snapshots)
def past_its_peak(run: Run) -> Iterator[Sign]:
    """The fused model was better at an earlier snapshot, on images held back to choose by where there are some."""
    chosen = run.validation.get(run.main_rule, {})
    curve = chosen or run.curves[run.main_rule]
    last, best = max(curve), max(curve, key=lambda epoch: (curve[epoch], -epoch))
    lost = round(100 * (curve[best] - curve[last]), 6)
    if lost < PAST_PEAK:
        return
    where = "on validation data" if chosen else "seen on test data"
    evidence = (
        f"{run.main_rule} had {100 * curve[best]:.1f} % at epoch {best} and has {100 * curve[last]:.1f} % at epoch {last}, "
        f"{lost:.1f} points less ({where})"
    )
    advice = (
        f"train {best} epochs (--epochs {best}; another run where s, stages or the learning rate follow the whole training), "
        "or find what drives accuracy down"
    )
    if not chosen:
        advice = f"train less (about {best} epochs), or find what drives accuracy down; choose the epoch on data held back: --set validation=0.1"
    yield Sign("warning", last, lost, PAST_PEAK, evidence, advice)


def _luck(accuracy: float, tested: int) -> float:
    """What two accuracies on so many test images may differ by chance: two standard errors of their difference."""
    return 2 * math.sqrt(2 * accuracy * (1 - accuracy) / tested) if tested else 0.0


def _not_at_the_end(run: Run) -> str:
    scored = run.epochs in run.curves.get(run.main_rule, {}) and any(run.epochs in each for each in run.alone.values())
    return "" if scored else "not scored at the end of training"  # earlier, networks that know little often fuse badly


@run_rule("fusion-worse-than-best-client", _not_at_the_end)
def fusion_worse_than_best_client(run: Run) -> Iterator[Sign]:
    """One client alone beats the fused model."""
    end = run.epochs
    fused = {name: curve[end] for name, curve in run.curves.items() if end in curve}
    alone = {client: scores[end] for client, scores in run.alone.items() if end in scores}
    best, better = max(alone, key=lambda client: alone[client]), max(fused, key=lambda name: fused[name])
    if fused[run.main_rule] < alone[best] - _luck(alone[best], sum(run.tested)):
        evidence = f"{run.main_rule} has {100 * fused[run.main_rule]:.1f} %, {best} alone {100 * alone[best]:.1f} %"
        advice = "try other rules on the same uploads: oneround fuse RUN --rule all"
        if fused[better] > alone[best]:
            advice = f"{better} has {100 * fused[better]:.1f} % on the same uploads: put it first in fusion"
        yield Sign("problem", end, fused[run.main_rule], alone[best], evidence, advice)
