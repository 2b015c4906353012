"""Rules about λ, the weight of alignment, and about the σ that it is learned from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from oneround.analysis.diagnosis.rules import Finding, applied_lambda, client_rule, requires, streak_of, sustained
from oneround.runs.log import EpochMetrics
from oneround.runs.record import RunRecord
from oneround.training.alignment.aligner import instability_threshold

FIRST_EPOCHS = 3  # where λ starts: the smallest of these
GROWTH = 100.0  # learned weights settle within a factor of 100 of their start; those that go on do not come back
HARMLESS_WEIGHT = 50.0  # what the guards allow by default: growth to less is no explosion, however small the first λ
SWING = 1.5  # a change by this factor, up and down again: batch noise moves σ² by a few percent
SWINGS, SWING_WINDOW = 3, 10  # so many swings within so many epochs: one or two are normal at first
LEAP = 1e4  # a change by this factor from one epoch to the next: a weight that follows the losses never moves so fast
WARM_UP = 2  # epochs in which σ finds its level
MOST_LOG = 690.0  # e^690 is about as large as a number gets
LEARNED_WEIGHT = {"lambda_raw": "raw λ", "sigma_align": "σ² of alignment", "sigma_base": "σ² of the base loss"}


@client_rule("exploding-lambda", requires("lambda_raw", "lambda_effective", otherwise="no λ measured"))
def exploding_lambda(run: RunRecord, client: str) -> Iterator[Finding]:
    """The raw or the applied λ grew to a hundred times its start, or passed the limit of the safeguards."""
    entries = run.series(client, "lambda_raw", "lambda_effective")
    first = min((entry["lambda_raw"] for entry in entries[:FIRST_EPOCHS] if entry["lambda_raw"] > 0), default=math.inf)
    largest_weight, grown = run.recipe.safeguards.largest_weight, max(GROWTH * first, HARMLESS_WEIGHT)
    limit = min(largest_weight, grown)
    raw = next((entry for entry in entries if not entry["lambda_raw"] < limit), None)
    passed = next((entry for entry in entries if not applied_lambda(entry) < limit), None)
    crossing = min((entry for entry in (raw, passed) if entry), key=lambda entry: entry["epoch"], default=None)
    if crossing is None:
        return
    value = crossing["lambda_raw"] if crossing is raw else applied_lambda(crossing)
    over = (
        f"safeguards.largest_weight = {largest_weight:g}"
        if limit == largest_weight
        else f"{limit:.4g}, at least {GROWTH:g} times its start"
    )
    largest = max(entries, key=lambda entry: entry["lambda_raw"])
    evidence = (
        f"{'raw λ' if crossing is raw else 'λ'} began at {first:.4g} and passed {over}, with {value:.4g}; its largest is "
        f"{largest['lambda_raw']:.4g} (epoch {largest['epoch']}). What acts on the network "
        + (f"passed it in epoch {passed['epoch']} with {applied_lambda(passed):.4g}" if passed else "stays below")
        + _stability(run, entries)
    )
    advice = "bound λ (etf-guarded, etf-hinge, --set alignment.guard=clamp), or let it fall with s (etf-decaying, etf-equilibrium)"
    yield Finding("problem" if passed else "warning", crossing["epoch"], value, limit, evidence, advice)


def _stability(run: RunRecord, entries: Sequence[EpochMetrics]) -> str:
    """The λ above which SGD on the prototypes is unstable, and whether the applied λ passed it."""
    alignment, training, classes = run.recipe.alignment, run.recipe.training, len(run.class_names)
    if alignment is None or not classes or run.feature_size is None:
        return ""
    if (alignment.target, alignment.classes, alignment.distance) != ("prototypes", "all", "squared"):
        return ""  # the formula does not hold
    threshold = instability_threshold(run.recipe, classes, run.feature_size)
    past = next((entry["epoch"] for entry in entries if applied_lambda(entry) > threshold), None)
    return (
        f"; SGD on the prototypes is unstable above (1 + μ)·C·d/lr = (1 + {training.momentum:g})·{classes}·{run.feature_size}/"
        f"{training.learning_rate:g} = {threshold:.4g}" + (f", passed in epoch {past}" if past else "")
    )


@client_rule("over-alignment", requires("align", "base", "lambda_effective", otherwise="no alignment"))
def over_alignment(run: RunRecord, client: str) -> Iterator[Finding]:
    """λ·L_align is larger than L_base for many epochs in a row."""

    def ratio(entry: EpochMetrics) -> float:
        weighted: float = applied_lambda(entry) * entry["align"]
        return weighted / entry["base"] if entry["base"] > 0 else math.inf

    entries = run.series(client, "align", "base", "lambda_effective")
    streak = streak_of(entries, lambda entry: ratio(entry) > 1, sustained(run, long=True))
    if streak:
        last, worst = streak[-1], max(entries, key=ratio)
        evidence = (
            f"λ·L_align > L_base for {len(streak)} epochs in a row (epochs {streak[0]['epoch']} to {last['epoch']}): "
            f"{applied_lambda(last):.4g}·{last['align']:.3g} against {last['base']:.3g}; at worst {ratio(worst):.3g} times (epoch {worst['epoch']})"
        )
        advice = "lower λ (alignment.weight), bound it (alignment.guard) or let s fall (alignment.schedule): the anchors decide, not the data"
        yield Finding("warning", last["epoch"], ratio(last), 1.0, evidence, advice)


@client_rule("unstable-sigma", requires("sigma_base", "sigma_align", otherwise="no learned σ"))
def unstable_sigma(run: RunRecord, client: str) -> Iterator[Finding]:
    """σ² or raw λ swings up and down by half or more, or changes by orders of magnitude in one epoch."""
    advice = "lower alignment.weight.rate: the steps of σ overshoot; etf-equilibrium computes λ and learns no σ"
    for name, label in LEARNED_WEIGHT.items():
        entries = run.series(client, "sigma_base", "sigma_align", name)[WARM_UP:]
        steps = _steps(entries, name)
        turns, leaps = _turns(steps), [(epoch, step) for epoch, step in steps if abs(step) >= math.log(LEAP)]
        close = [n for n in range(SWINGS - 1, len(turns)) if turns[n] - turns[n - SWINGS + 1] < SWING_WINDOW]
        if close:
            at = turns[close[0] - SWINGS + 1 : close[0] + 1]
            evidence = (
                f"{label} turned {SWINGS} times within {SWING_WINDOW} epochs, by a factor of {SWING:g} and more each way "
                f"(epochs {', '.join(map(str, at))}; {len(turns)} times in all, {_extent(entries, name)})"
            )
            yield Finding("warning", at[-1], float(len(turns)), float(SWINGS), evidence, advice)
            return  # λ is computed from both σ: one finding for the three is enough
        if leaps:
            epoch, size = leaps[0][0], math.exp(min(abs(leaps[0][1]), MOST_LOG))
            evidence = f"{label} changed by a factor of {size:.3g} in one epoch ({_extent(entries, name)} in all)"
            yield Finding("warning", epoch, size, LEAP, evidence, advice)
            return


def _extent(entries: Sequence[EpochMetrics], name: str) -> str:
    values = [entry[name] for entry in entries]
    return f"between {min(values):.3g} and {max(values):.3g}"


def _steps(entries: Sequence[EpochMetrics], name: str) -> list[tuple[int, float]]:
    """Epochs with the logarithm of the change since the previous one; numbers are clamped to the range of floats."""
    logs = [math.log(min(max(entry[name], math.exp(-MOST_LOG)), math.exp(MOST_LOG))) for entry in entries]
    return [
        (entry["epoch"], after - before) for entry, (before, after) in zip(entries[1:], pairwise(logs), strict=True)
    ]


def _turns(steps: Sequence[tuple[int, float]]) -> list[int]:
    """Epochs whose large change reverses the large change just before."""
    return [
        epoch
        for (_, before), (epoch, now) in pairwise(steps)
        if before * now < 0 and min(abs(before), abs(now)) >= math.log(SWING)
    ]
