"""Rules about gradients that oppose each other and features that collapse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oneround.analysis.diagnosis.rules import (
    SUSTAINED,
    Finding,
    Severity,
    applied_lambda,
    client_rule,
    requires,
    streak_of,
    sustained,
)
from oneround.runs.log import EpochMetrics
from oneround.runs.record import RunRecord
from oneround.training.objective import active, stage_of

OPPOSED = -0.1  # cosine: two random directions are nearer to 0
NEGLIGIBLE = 0.05  # a gradient under 5 % of the other's length cannot undo its work
COLLAPSED = 0.01  # spread of unit features; two classes of equal size at a right angle have 0.5
MIXED = 0.1  # 1 − Σ share²: below it nearly all samples are of one class and the features may well be one point


@client_rule("gradient-interference", requires("gradients", otherwise="no gradients traced (trace.every)"))
def gradient_interference(run: RunRecord, client: str) -> Iterator[Finding]:
    """The gradients of two terms oppose each other in several traced epochs in a row."""
    entries = run.series(client, "gradients")
    measured = [item for entry in entries for item in entry["gradients"].items()]
    for tensor, pair in sorted({(tensor, pair) for tensor, gradients in measured for pair in gradients["cosine"]}):

        def opposed(entry: EpochMetrics, tensor: str = tensor, pair: str = pair) -> bool:
            cosine = _cosine(entry, tensor, pair)
            return cosine is not None and cosine < OPPOSED and _strength(run, entry, tensor, pair) >= NEGLIGIBLE

        streak = streak_of(entries, opposed, SUSTAINED)
        if streak:
            last, about = streak[-1], f"{pair} at the {tensor}"
            cosines = [value for entry in streak if (value := _cosine(entry, tensor, pair)) is not None]
            evidence = (
                f"the gradients of {about} have a cosine of {', '.join(f'{value:.2f}' for value in cosines)} in epochs "
                f"{', '.join(str(entry['epoch']) for entry in streak)}: below {OPPOSED} in {SUSTAINED} traced epochs in a row"
            )
            severity: Severity = "warning"
            advice = "give one of the two less weight, or let them act one after the other (objective.stages)"
            if "alignment" in pair:  # once training has converged, the two are opposite by construction
                severity = "note"
                advice = "where training has converged, the two balance; before, lower λ, let s fall (alignment.schedule) or align later (objective.stages)"
            yield Finding(severity, last["epoch"], cosines[-1], OPPOSED, evidence, advice, about)


def _cosine(entry: EpochMetrics, tensor: str, pair: str) -> float | None:
    value: float | None = entry["gradients"].get(tensor, {}).get("cosine", {}).get(pair)
    return value


def _strength(run: RunRecord, entry: EpochMetrics, tensor: str, pair: str) -> float:
    """Length of the shorter of two gradients over the longer, both multiplied by their weights in the loss."""
    weights = _weights(run, entry)
    norms = entry["gradients"][tensor]["norm"]
    one, other = (weights.get(name, 1.0) * norms.get(name, 0.0) for name in pair.split(" · "))
    return min(one, other) / max(one, other) if max(one, other) > 0 else 0.0


def _weights(run: RunRecord, entry: EpochMetrics) -> dict[str, float]:
    """The factor of every term's gradient in an epoch; `base` contains the terms' weights already."""
    stages = run.recipe.objective.stages
    stage = stages[stage_of(run.recipe.objective, entry["epoch"] - 1, run.recipe.training_epochs)] if stages else None
    terms = {name: weight for name, (_, weight) in active(run.recipe.objective, stage).items()}
    return {**terms, "base": 1.0, "alignment": applied_lambda(entry) if "lambda_effective" in entry else 1.0}


@client_rule("feature-collapse", requires("spread", otherwise="no spread measured"))
def feature_collapse(run: RunRecord, client: str) -> Iterator[Finding]:
    """The features of several classes are nearly one point."""
    entries, mix = run.series(client, "spread"), _mix(run.counts.get(client, ()))
    if mix is not None and mix < MIXED:
        return

    def collapsed(entry: EpochMetrics) -> bool:
        return entry.get("classes_seen", 2) > 1 and bool(entry["spread"] < COLLAPSED)

    streak = streak_of(entries, collapsed, sustained(run))
    if streak:
        last = streak[-1]
        evidence = (
            f"1 − ‖mean of the unit features‖² = {last['spread']:.2g} with {last.get('classes_seen', 'several')} classes, "
            f"{len(streak)} epochs in a row: all images look alike to this encoder"
        )
        advice = "lower training.learning_rate or clip (training.clip_norm = 1); keep a term that pushes apart (supervised-contrastive)"
        yield Finding("problem", last["epoch"], last["spread"], COLLAPSED, evidence, advice)


def _mix(counts: Sequence[int]) -> float | None:
    """1 − Σ share²: the chance that two samples differ in class."""
    total = sum(counts)
    return 1 - sum((count / total) ** 2 for count in counts) if total else None
