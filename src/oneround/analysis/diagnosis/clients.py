"""Rules about clients that did not learn or diverged."""

from __future__ import annotations

import math
from collections.abc import Iterator

from oneround.analysis.diagnosis.rules import Finding, applied_lambda, client_rule, requires
from oneround.runs.record import RunRecord

LEARNED = 0.05  # a smaller relative fall of the loss means that nothing was learned
LEARNED_ALREADY = 0.05  # a first loss below this share of log C (chance) was learned within the first epoch
ENOUGH_EPOCHS = 10  # a slow start is no failure
LEARNABLE = 0.05  # a class with a smaller share of a client's samples is not expected to be learned


@client_rule("never-learned", requires("base", otherwise="no epoch measured"))
def never_learned(run: RunRecord, client: str) -> Iterator[Finding]:
    """The loss hardly fell, or the local model is no better than always predicting the most frequent class."""
    yield from _loss_stood_still(run, client)
    yield from _no_better_than_majority(run, client)


def _loss_stood_still(run: RunRecord, client: str) -> Iterator[Finding]:
    name = "cross-entropy" if len(run.series(client, "cross-entropy")) > 1 else "base"
    entries = run.series(client, name)
    terms = run.recipe.objective.terms.keys()  # another stage has another loss
    same = [entry for entry in entries if entry.keys() & terms == entries[-1].keys() & terms]
    if len(same) < 2 or entries[-1]["epoch"] < min(run.recipe.epochs, ENOUGH_EPOCHS):
        return
    first, last, lowest = same[0], same[-1], min(same, key=lambda entry: entry[name])
    chance = math.log(max(len(run.class_names), 2))
    fall = 1 - last[name] / first[name] if first[name] > 0 else 0.0
    if fall >= LEARNED or first[name] < LEARNED_ALREADY * chance:
        return
    unlearned = lowest[name] <= (1 - LEARNED) * first[name]
    evidence = (
        f"{'L_base' if name == 'base' else name} was {first[name]:.4g} in epoch {first['epoch']}"
        + (f", {lowest[name]:.4g} at its lowest (epoch {lowest['epoch']})" if unlearned else "")
        + f" and is {last[name]:.4g} in epoch {last['epoch']}: a fall of {100 * fall:.1f} %, less than {100 * LEARNED:g} %"
    )
    advice = (
        "raise training.learning_rate or training.epochs; if others learn and this client does not, look at its data"
    )
    if unlearned or fall < -LEARNED:
        advice = "the loss rose again after its minimum: lower training.learning_rate, or λ if the recipe aligns"
    yield Finding("problem", last["epoch"], fall, LEARNED, evidence, advice, "loss")


def _no_better_than_majority(run: RunRecord, client: str) -> Iterator[Finding]:
    counts, accuracies = run.counts.get(client, ()), run.measurements.local_accuracy.get(client, {})
    learnable = [count for count in counts if count >= LEARNABLE * sum(counts) > 0]
    if len(learnable) < 2 or not accuracies or not sum(run.test_counts):
        return
    epoch = max(accuracies)
    most = max(range(len(counts)), key=lambda label: counts[label])
    share = run.test_counts[most] / sum(run.test_counts)
    if accuracies[epoch] <= share:
        named = run.class_names[most] if run.class_names else str(most)
        evidence = (
            f"its local accuracy is {100 * accuracies[epoch]:.1f} %; always predicting its most frequent class "
            f"({named}) would be right on {100 * share:.1f} %"
        )
        advice = "look at its data and loss; train more epochs, or use a fusion rule that gives it weight only on images like its own (typicality-gated)"
        yield Finding("warning", epoch, accuracies[epoch], share, evidence, advice, "accuracy")


@client_rule("diverged", requires("epoch", otherwise="no epoch measured"))
def diverged(run: RunRecord, client: str) -> Iterator[Finding]:
    """The safeguards stopped a client, switched off its alignment, or marked an epoch for a reason that no other rule reports."""
    if client in run.stopped:
        epoch, why = run.stopped[client]
        advice = "fix the cause it names and run again; the uploads so far can be scored with oneround fuse"
        evidence = f"stopped after epoch {epoch} of {run.recipe.epochs}: {why}"
        yield Finding("problem", epoch, float(epoch), float(run.recipe.epochs), evidence, advice, "stopped")
    entries = run.series(client, "lambda_effective", "lambda_raw", "s")
    dropped = next(
        (entry for entry in entries if applied_lambda(entry) == 0 < min(entry["lambda_raw"], entry["s"])), None
    )
    if dropped is not None and run.recipe.safeguards.on_explosion == "clamp":
        evidence = f"λ is held at 0 although raw λ = {dropped['lambda_raw']:.4g} and s = {dropped['s']:.2g}: the safeguards dropped the alignment of a client that diverged or collapsed"
        advice = "run.log has the cause; lower λ or training.learning_rate"
        yield Finding("problem", dropped["epoch"], 0.0, 0.0, evidence, advice, "alignment dropped")
    for entry in run.series(client, "trouble"):
        kinds = [kind for kind in entry["trouble"] if kind not in ("weight", "collapse")]  # they have their own rules
        if kinds:
            evidence = f"the safeguards marked it: {', '.join(kinds)}"
            yield Finding("problem", entry["epoch"], 1.0, 0.0, evidence, "run.log has the cause", ", ".join(kinds))
            return
