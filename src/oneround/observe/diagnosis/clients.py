"""Rules about clients that did not learn, or lost what they had learned."""

from __future__ import annotations

import math
from collections.abc import Iterator

from oneround.observe.diagnosis.run import Run, Sign, acting, client_rule, unless

LEARNED = 0.05  # the fall of the loss below which nothing was learned
LEARNED_ALREADY = 0.05  # a first loss below this share of log C (chance) was learned within the first epoch
ENOUGH_EPOCHS = 10  # a slow start is no failure
OF_WEIGHT = 0.05  # a class with less of a client's samples hardly counts among what it can learn


@client_rule("never-learned", unless("no epoch measured", "base"))
def never_learned(run: Run, client: str) -> Iterator[Sign]:
    """The loss hardly fell, or the client alone answers no better than its most frequent class."""
    yield from _loss_stood_still(run, client)
    yield from _no_better_than_majority(run, client)


def _loss_stood_still(run: Run, client: str) -> Iterator[Sign]:
    name = "cross-entropy" if len(run.series(client, "cross-entropy")) > 1 else "base"
    entries = run.series(client, name)
    terms = run.recipe.objective.terms.keys()  # another stage has another loss
    same = [entry for entry in entries if entry.keys() & terms == entries[-1].keys() & terms]
    if len(same) < 2 or entries[-1]["epoch"] < min(run.epochs, ENOUGH_EPOCHS):
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
        advice = "what it learned was lost again: lower training.learning_rate, or λ where there is one"
    yield Sign("problem", last["epoch"], fall, LEARNED, evidence, advice, "loss")


def _no_better_than_majority(run: Run, client: str) -> Iterator[Sign]:
    counts, accuracies = run.counts.get(client, ()), run.alone.get(client, {})
    held = [count for count in counts if count >= OF_WEIGHT * sum(counts) > 0]
    if len(held) < 2 or not accuracies or not sum(run.tested):
        return
    epoch = max(accuracies)
    most = max(range(len(counts)), key=lambda label: counts[label])
    share = run.tested[most] / sum(run.tested)
    if accuracies[epoch] <= share:
        named = run.class_names[most] if run.class_names else str(most)
        evidence = (
            f"alone it is right on {100 * accuracies[epoch]:.1f} % of the test images; always answering its most frequent class "
            f"({named}) would be right on {100 * share:.1f} %"
        )
        advice = "look at its data and loss; give it more epochs, or a fusion rule that hears it only on what it knows (typicality-gated)"
        yield Sign("warning", epoch, accuracies[epoch], share, evidence, advice, "accuracy")


@client_rule("diverged", unless("no epoch measured", "epoch"))
def diverged(run: Run, client: str) -> Iterator[Sign]:
    """The rails ended a client's training, dropped its alignment, or saw what no other rule here tells."""
    if client in run.stopped:
        epoch, why = run.stopped[client]
        advice = "put right the cause it names and run again; what was uploaded can be scored with oneround fuse"
        evidence = f"stopped after epoch {epoch} of {run.epochs}: {why}"
        yield Sign("problem", epoch, float(epoch), float(run.epochs), evidence, advice, "stopped")
    entries = run.series(client, "lambda_effective", "lambda_raw", "s")
    dropped = next((entry for entry in entries if acting(entry) == 0 < min(entry["lambda_raw"], entry["s"])), None)
    if dropped is not None and run.recipe.rails.on_explosion == "clamp":
        evidence = f"λ is held at 0 although raw λ = {dropped['lambda_raw']:.4g} and s = {dropped['s']:.2g}: the rails dropped the alignment of a client that diverged or collapsed"
        advice = "run.log has the cause; lower λ or training.learning_rate"
        yield Sign("problem", dropped["epoch"], 0.0, 0.0, evidence, advice, "alignment dropped")
    told_elsewhere = {"weight", "collapse"}
    for entry in run.series(client, "trouble"):
        kinds = [kind for kind in entry["trouble"] if kind not in told_elsewhere]
        if kinds:
            evidence = f"the rails marked it: {', '.join(kinds)}"
            yield Sign("problem", entry["epoch"], 1.0, 0.0, evidence, "run.log has the cause", ", ".join(kinds))
            return
