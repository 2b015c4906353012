"""Rules about λ and what it is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from oneround.observe.diagnosis.run import Entry, Run, Sign, acting, client_rule, streak_of, unless

FIRST_EPOCHS = 3  # where λ starts: the smallest of these
GROWTH = 100.0  # learned weights settle within a factor of 100 of their start; those that go on do not come back
HARMLESS_WEIGHT = 50.0  # what the guards allow by default: growing to less is no explosion, however small λ began
SWING = 1.5  # a change by this factor, there and back: batch noise moves σ² by a few percent
SWINGS, SWING_WINDOW = 3, 10  # so many swings within so many epochs: once or twice is settling
LEAP = 1e4  # a change by this factor from one epoch to the next: nothing that follows the losses moves like that
WARM_UP = 2  # epochs in which σ finds its level
MOST_LOG = 690.0  # e^690 is about as large as a number gets
LEARNED_WEIGHT = {"lambda_raw": "raw λ", "sigma_align": "σ² of alignment", "sigma_base": "σ² of the base loss"}


@client_rule("exploding-lambda", unless("no λ measured", "lambda_raw", "lambda_effective"))
def exploding_lambda(run: Run, client: str) -> Iterator[Sign]:
    """λ, raw or as it acts, grew a hundredfold from where it began, or passed the rails."""
    entries = run.series(client, "lambda_raw", "lambda_effective")
    first = min((entry["lambda_raw"] for entry in entries[:FIRST_EPOCHS] if entry["lambda_raw"] > 0), default=math.inf)
    rails, grown = run.recipe.rails.largest_weight, max(GROWTH * first, HARMLESS_WEIGHT)
    limit = min(rails, grown)
    raw = next((entry for entry in entries if not entry["lambda_raw"] < limit), None)
    passed = next((entry for entry in entries if not acting(entry) < limit), None)
    there = min((entry for entry in (raw, passed) if entry), key=lambda entry: entry["epoch"], default=None)
    if there is None:
        return
    value = there["lambda_raw"] if there is raw else acting(there)
    over = (
        f"rails.largest_weight = {rails:g}" if limit == rails else f"{limit:.4g}, at least {GROWTH:g} times its start"
    )
    largest = max(entries, key=lambda entry: entry["lambda_raw"])
    evidence = (
        f"{'raw λ' if there is raw else 'λ'} began at {first:.4g} and passed {over}, with {value:.4g}; its largest is "
        f"{largest['lambda_raw']:.4g} (epoch {largest['epoch']}). What acts on the network "
        + (f"passed it in epoch {passed['epoch']} with {acting(passed):.4g}" if passed else "stays below")
        + _stability(run, entries)
    )
    advice = "bound λ (etf-guarded, etf-hinge, --set alignment.guard=clamp), or let it fall with s (etf-decaying, etf-equilibrium)"
    yield Sign("problem" if passed else "warning", there["epoch"], value, limit, evidence, advice)


def _stability(run: Run, entries: Sequence[Entry]) -> str:
    """The λ above which SGD on the prototypes is unstable, and whether what acts passed it."""
    if run.threshold is None:
        return ""
    training, classes = run.recipe.training, len(run.class_names)
    past = next((entry["epoch"] for entry in entries if acting(entry) > run.threshold), None)
    return (
        f"; SGD on the prototypes is unstable above (1 + μ)·C·d/lr = (1 + {training.momentum:g})·{classes}·{run.features}/"
        f"{training.learning_rate:g} = {run.threshold:.4g}" + (f", passed in epoch {past}" if past else "")
    )


@client_rule("over-alignment", unless("no alignment", "align", "base", "lambda_effective"))
def over_alignment(run: Run, client: str) -> Iterator[Sign]:
    """λ·L_align outweighs L_base for long."""

    def ratio(entry: Entry) -> float:
        pull: float = acting(entry) * entry["align"]
        return pull / entry["base"] if entry["base"] > 0 else math.inf

    entries = run.series(client, "align", "base", "lambda_effective")
    streak = streak_of(entries, lambda entry: ratio(entry) > 1, run.sustained(long=True))
    if streak:
        last, worst = streak[-1], max(entries, key=ratio)
        evidence = (
            f"λ·L_align > L_base for {len(streak)} epochs in a row (epochs {streak[0]['epoch']} to {last['epoch']}): "
            f"{acting(last):.4g}·{last['align']:.3g} against {last['base']:.3g}; at worst {ratio(worst):.3g} times (epoch {worst['epoch']})"
        )
        advice = "lower λ (alignment.weight), bound it (alignment.guard) or let s fall (alignment.schedule): the anchors decide, not the data"
        yield Sign("warning", last["epoch"], ratio(last), 1.0, evidence, advice)


@client_rule("unstable-sigma", unless("no learned σ", "sigma_base", "sigma_align"))
def unstable_sigma(run: Run, client: str) -> Iterator[Sign]:
    """σ² or raw λ goes up and down by half and more, again and again, or leaps by orders of magnitude."""
    advice = "lower alignment.weight.rate: the steps of σ overshoot; etf-equilibrium computes λ and learns no σ"
    for name, shown in LEARNED_WEIGHT.items():
        entries = run.series(client, "sigma_base", "sigma_align", name)[WARM_UP:]
        steps = _steps(entries, name)
        turns, leaps = _turns(steps), [(epoch, step) for epoch, step in steps if abs(step) >= math.log(LEAP)]
        close = [n for n in range(SWINGS - 1, len(turns)) if turns[n] - turns[n - SWINGS + 1] < SWING_WINDOW]
        if close:
            at = turns[close[0] - SWINGS + 1 : close[0] + 1]
            evidence = (
                f"{shown} turned {SWINGS} times within {SWING_WINDOW} epochs, by a factor of {SWING:g} and more each way "
                f"(epochs {', '.join(map(str, at))}; {len(turns)} times in all, {_extent(entries, name)})"
            )
            yield Sign("warning", at[-1], float(len(turns)), float(SWINGS), evidence, advice)
            return  # λ is made of both σ: one of the three says it
        if leaps:
            epoch, size = leaps[0][0], math.exp(min(abs(leaps[0][1]), MOST_LOG))
            evidence = f"{shown} changed by a factor of {size:.3g} in one epoch ({_extent(entries, name)} in all)"
            yield Sign("warning", epoch, size, LEAP, evidence, advice)
            return


def _extent(entries: Sequence[Entry], name: str) -> str:
    values = [entry[name] for entry in entries]
    return f"between {min(values):.3g} and {max(values):.3g}"


def _steps(entries: Sequence[Entry], name: str) -> list[tuple[int, float]]:
    """Epochs and the logarithm of the change they brought; numbers that ran out of range count as the end of it."""
    logs = [math.log(min(max(entry[name], math.exp(-MOST_LOG)), math.exp(MOST_LOG))) for entry in entries]
    return [
        (entry["epoch"], after - before) for entry, (before, after) in zip(entries[1:], pairwise(logs), strict=True)
    ]


def _turns(steps: Sequence[tuple[int, float]]) -> list[int]:
    """Epochs at which a large change is the reverse of a large one before it."""
    return [
        epoch
        for (_, before), (epoch, now) in pairwise(steps)
        if before * now < 0 and min(abs(before), abs(now)) >= math.log(SWING)
    ]
