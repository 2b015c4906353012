"""What went wrong in a run: rules over what its clients measured; every finding with its evidence and advice.

A rule is one function from a run (or from one client of it) to the signs it sees, registered in `RULES` with what it needs to
see anything. The same rules serve a folder on disk and a run that is still training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from oneround.learning.alignment import instability_threshold
from oneround.learning.objective import active, stage_of
from oneround.recipe import Federated

Severity = Literal["problem", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")
Entry = Mapping[str, Any]

SUSTAINED = 3  # epochs in a row: one can be an accident of its last batch, three are not
SUSTAINED_SHARE = 0.1  # of all epochs, where that is longer: three of five hundred are a passing phase
FIRST_EPOCHS = 3  # where λ starts: the smallest of these
GROWTH = 100.0  # learned weights settle within a factor of 100 of their start; those that go on do not come back
HARMLESS_WEIGHT = 50.0  # what the guards allow by default: growing to less is no explosion, however small λ began
SWING = 1.5  # a change by this factor, there and back: batch noise moves σ² by a few percent
SWINGS, SWING_WINDOW = 3, 10  # so many swings within so many epochs: once or twice is settling
LEAP = 1e4  # a change by this factor from one epoch to the next: nothing that follows the losses moves like that
WARM_UP = 2  # epochs in which σ finds its level
OPPOSED = -0.1  # cosine: nearer to 0 is the angle of two random directions
FEEBLE = 0.05  # a gradient under 5 % of the other's length cannot undo its work
COLLAPSED = 0.01  # spread of unit features; two evenly mixed classes at a right angle have 0.5
MIXED = 0.1  # 1 − Σ share²: below it nearly all samples are of one class and the features may well be one point
LEARNED = 0.05  # the fall of the loss below which nothing was learned
LEARNED_ALREADY = 0.05  # a first loss below this share of log C (chance) was learned within the first epoch
ENOUGH_EPOCHS = 10  # a slow start is no failure
OF_WEIGHT = 0.05  # a class with less of a client's samples hardly counts among what it can learn
PAST_PEAK = 3.0  # points: more than a snapshot's accuracy jitters from epoch to epoch
MOST_LOG = 690.0  # e^690 is about as large as a number gets
LEARNED_WEIGHT = {"lambda_raw": "raw λ", "sigma_align": "σ² of alignment", "sigma_base": "σ² of the base loss"}
PLAIN_MEANS = ("iffi", "informative-iffi", "average")  # rules that average every client's prototype of a class alike


@dataclass(frozen=True)
class Finding:
    """One thing a rule found."""

    rule: str
    severity: Severity
    client: str | None
    epoch: int | None
    value: float
    threshold: float
    """What the value crossed."""
    evidence: str
    advice: str
    about: str = ""
    """Which of several, where a rule can find more than one thing at a client."""

    @property
    def key(self) -> tuple[str, str | None, str, str]:
        """What makes it the same finding when it is seen again with more epochs."""
        return self.rule, self.client, self.about, self.severity

    @property
    def where(self) -> str:
        """`client_002, epoch 14`"""
        return ", ".join([*([self.client] if self.client else []), *([f"epoch {self.epoch}"] if self.epoch else [])])

    @property
    def words(self) -> str:
        """In a line, as it is told during a run."""
        return f"{self.severity}: {self.rule}{f' ({self.where})' if self.where else ''}: {self.evidence}"

    def plain(self) -> dict[str, Any]:
        """JSON-ready; a number that is not finite is null (the evidence has it in words)."""
        numbers = {name: getattr(self, name) for name in ("value", "threshold")}
        return asdict(self) | {name: value if math.isfinite(value) else None for name, value in numbers.items()}


class Sign(NamedTuple):
    """A finding as its rule tells it: whose and under which name is added outside."""

    severity: Severity
    epoch: int | None
    value: float
    threshold: float
    evidence: str
    advice: str
    about: str = ""

    def found_by(self, rule: str, client: str | None) -> Finding:
        return Finding(rule, client=client, **self._asdict())


@dataclass(frozen=True)
class Run:
    """All that rules may look at: what a run was asked for and what it measured so far."""

    recipe: Federated
    entries: Mapping[str, Sequence[Entry]] = field(default_factory=dict)
    """By client: what it measured, an entry an epoch."""
    counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By client: its samples of each class."""
    class_names: Sequence[str] = ()
    features: int | None = None
    """Entries of a prototype."""
    shared: int | None = None
    """Samples that several clients hold; None: not known."""
    stopped: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """By client that ended before its time: its last epoch, and why."""
    curves: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Test accuracy by rule and epoch."""
    alone: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Test accuracy by client and epoch."""
    tested: Sequence[int] = ()
    """Test images of each class."""

    @property
    def epochs(self) -> int:
        return self.recipe.training.epochs

    @property
    def clients(self) -> list[str]:
        return sorted({*self.entries, *self.stopped})

    @property
    def main_rule(self) -> str:
        """The fusion rule that makes the model."""
        return self.recipe.fusion[0].label

    @property
    def threshold(self) -> float | None:
        """λ above which SGD on the prototypes is unstable, where the sizes are known and its formula holds."""
        pull = self.recipe.alignment
        if pull is None or (pull.target, pull.classes, pull.distance) != ("prototypes", "all", "squared"):
            return None
        if not self.class_names or self.features is None:
            return None
        return instability_threshold(self.recipe, len(self.class_names), self.features)

    def series(self, client: str, *keys: str) -> list[Entry]:
        """The entries of a client that have all of these."""
        return [entry for entry in self.entries.get(client, ()) if all(key in entry for key in keys)]

    def sustained(self, *, long: bool = False) -> int:
        """How many epochs in a row something must last; `long`: a share of the whole training at least."""
        share = math.ceil(SUSTAINED_SHARE * self.epochs) if long else 0
        return min(max(SUSTAINED, share), self.epochs)


ClientLook = Callable[[Run, str], Iterable[Sign]]
RunLook = Callable[[Run], Iterable[Sign]]
Lacking = Callable[[Run], str]


@dataclass(frozen=True)
class Rule:
    """A rule in the table: its name, what it lacks to judge a run, and how it looks."""

    name: str
    lacking: Lacking
    """Why it has nothing to look at; empty when it has."""
    at_client: ClientLook | None = None
    at_run: RunLook | None = None

    def look(self, run: Run, clients: Iterable[str]) -> Iterator[Finding]:
        """What it finds at these clients; a rule about the whole run looks at all of it."""
        if self.at_run is not None:
            yield from (sign.found_by(self.name, None) for sign in self.at_run(run))
        if self.at_client is not None:
            for client in clients:
                yield from (sign.found_by(self.name, client) for sign in self.at_client(run, client))


RULES: list[Rule] = []


def client_rule(name: str, lacking: Lacking) -> Callable[[ClientLook], ClientLook]:
    """Register a rule that looks at one client at a time."""

    def add(look: ClientLook) -> ClientLook:
        RULES.append(Rule(name, lacking, at_client=look))
        return look

    return add


def run_rule(name: str, lacking: Lacking) -> Callable[[RunLook], RunLook]:
    """Register a rule that looks at the run as a whole."""

    def add(look: RunLook) -> RunLook:
        RULES.append(Rule(name, lacking, at_run=look))
        return look

    return add


def findings(run: Run) -> list[Finding]:
    """What all rules find, the worst first."""
    found = [finding for rule in RULES if not rule.lacking(run) for finding in rule.look(run, run.clients)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _unless(reason: str, *keys: str) -> Lacking:
    """These measured by somebody, or `reason` why there is nothing to judge."""
    return lambda run: "" if any(run.series(client, *keys) for client in run.entries) else reason


def _streak(entries: Sequence[Entry], wrong: Callable[[Entry], bool], length: int) -> Sequence[Entry]:
    """The first so many entries in a row that are wrong."""
    begun = 0
    for number, entry in enumerate(entries):
        if not wrong(entry):
            begun = number + 1
        elif number + 1 - begun == length:
            return entries[begun : number + 1]
    return ()


# --- λ ---------------------------------------------------------------------------------------------------------------


@client_rule("exploding-lambda", _unless("no λ measured", "lambda_raw", "lambda_effective"))
def exploding_lambda(run: Run, client: str) -> Iterator[Sign]:
    """λ, raw or as it acts, grew a hundredfold from where it began, or passed the rails."""
    entries = run.series(client, "lambda_raw", "lambda_effective")
    first = min((entry["lambda_raw"] for entry in entries[:FIRST_EPOCHS] if entry["lambda_raw"] > 0), default=math.inf)
    rails, grown = run.recipe.rails.largest_weight, max(GROWTH * first, HARMLESS_WEIGHT)
    limit = min(rails, grown)
    raw = next((entry for entry in entries if not entry["lambda_raw"] < limit), None)
    acting = next((entry for entry in entries if not entry["lambda_effective"] < limit), None)
    there = min((entry for entry in (raw, acting) if entry), key=lambda entry: entry["epoch"], default=None)
    if there is None:
        return
    value = there["lambda_raw"] if there is raw else there["lambda_effective"]
    over = (
        f"rails.largest_weight = {rails:g}" if limit == rails else f"{limit:.4g}, at least {GROWTH:g} times its start"
    )
    largest = max(entries, key=lambda entry: entry["lambda_raw"])
    evidence = (
        f"{'raw λ' if there is raw else 'λ'} began at {first:.4g} and passed {over}, with {value:.4g}; its largest is "
        f"{largest['lambda_raw']:.4g} (epoch {largest['epoch']}). What acts on the network "
        + (f"passed it in epoch {acting['epoch']} with {acting['lambda_effective']:.4g}" if acting else "stays below")
        + _stability(run, entries)
    )
    advice = "bound λ (etf-guarded, etf-hinge, --set alignment.guard=clamp), or let it fall with s (etf-decaying, etf-equilibrium)"
    yield Sign("problem" if acting else "warning", there["epoch"], value, limit, evidence, advice)


def _stability(run: Run, entries: Sequence[Entry]) -> str:
    """The λ above which SGD on the prototypes is unstable, and whether what acts passed it."""
    if run.threshold is None:
        return ""
    training, classes = run.recipe.training, len(run.class_names)
    past = next((entry["epoch"] for entry in entries if entry["lambda_effective"] > run.threshold), None)
    return (
        f"; SGD on the prototypes is unstable above (1 + μ)·C·d/lr = (1 + {training.momentum:g})·{classes}·{run.features}/"
        f"{training.learning_rate:g} = {run.threshold:.4g}" + (f", passed in epoch {past}" if past else "")
    )


@client_rule("over-alignment", _unless("no alignment", "align", "base", "lambda_effective"))
def over_alignment(run: Run, client: str) -> Iterator[Sign]:
    """λ·L_align outweighs L_base for long."""

    def ratio(entry: Entry) -> float:
        pull: float = entry["lambda_effective"] * entry["align"]
        return pull / entry["base"] if entry["base"] > 0 else math.inf

    entries = run.series(client, "align", "base", "lambda_effective")
    streak = _streak(entries, lambda entry: ratio(entry) > 1, run.sustained(long=True))
    if streak:
        last, worst = streak[-1], max(entries, key=ratio)
        evidence = (
            f"λ·L_align > L_base for {len(streak)} epochs in a row (epochs {streak[0]['epoch']} to {last['epoch']}): "
            f"{last['lambda_effective']:.4g}·{last['align']:.3g} against {last['base']:.3g}; at worst {ratio(worst):.3g} times (epoch {worst['epoch']})"
        )
        advice = "lower λ (alignment.weight), bound it (alignment.guard) or let s fall (alignment.schedule): the anchors decide, not the data"
        yield Sign("warning", last["epoch"], ratio(last), 1.0, evidence, advice)


@client_rule("unstable-sigma", _unless("no learned σ", "sigma_base", "sigma_align"))
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


# --- gradients and features ------------------------------------------------------------------------------------------


@client_rule("gradient-interference", _unless("no gradients traced (trace.every)", "gradients"))
def gradient_interference(run: Run, client: str) -> Iterator[Sign]:
    """Two terms pull in opposite directions for several traced epochs."""
    entries = run.series(client, "gradients")
    places = sorted(
        {
            (place, pair)
            for entry in entries
            for place in entry["gradients"]
            for pair in entry["gradients"][place]["cosine"]
        }
    )
    for place, pair in places:

        def opposed(entry: Entry, place: str = place, pair: str = pair) -> bool:
            cosine = _cosine(entry, place, pair)
            return cosine is not None and cosine < OPPOSED and _strength(run, entry, place, pair) >= FEEBLE

        streak = _streak(entries, opposed, SUSTAINED)
        if streak:
            last, about = streak[-1], f"{pair} at the {place}"
            seen = [value for entry in streak if (value := _cosine(entry, place, pair)) is not None]
            evidence = (
                f"the gradients of {about} have a cosine of {', '.join(f'{value:.2f}' for value in seen)} in epochs "
                f"{', '.join(str(entry['epoch']) for entry in streak)}: below {OPPOSED} in {SUSTAINED} traced epochs in a row"
            )
            severity: Severity = "warning"
            advice = "give one of the two less weight, or let them act one after the other (objective.stages)"
            if "alignment" in pair:  # at rest the two balance: opposite by construction
                severity = "note"
                advice = "where training has come to rest this is the balance of both; before, lower λ, let s fall (alignment.schedule) or align later (objective.stages)"
            yield Sign(severity, last["epoch"], seen[-1], OPPOSED, evidence, advice, about)


def _cosine(entry: Entry, place: str, pair: str) -> float | None:
    value: float | None = entry["gradients"].get(place, {}).get("cosine", {}).get(pair)
    return value


def _strength(run: Run, entry: Entry, place: str, pair: str) -> float:
    """The shorter of two gradients, with their weights in the loss, over the longer."""
    weights = _weights(run, entry)
    norms = entry["gradients"][place]["norm"]
    one, other = (weights.get(name, 1.0) * norms.get(name, 0.0) for name in pair.split(" · "))
    return min(one, other) / max(one, other) if max(one, other) > 0 else 0.0


def _weights(run: Run, entry: Entry) -> dict[str, float]:
    """What every term's gradient is multiplied with in an epoch; `base` holds the terms' weights already."""
    stages = run.recipe.objective.stages
    stage = stages[stage_of(run.recipe.objective, entry["epoch"] - 1, run.epochs)] if stages else None
    terms = {name: weight for name, (_, weight) in active(run.recipe.objective, stage).items()}
    return {**terms, "base": 1.0, "alignment": entry.get("lambda_effective", 1.0)}


@client_rule("feature-collapse", _unless("no spread measured", "spread"))
def feature_collapse(run: Run, client: str) -> Iterator[Sign]:
    """Features of several classes are nearly one point."""
    entries, mix = run.series(client, "spread"), _mix(run.counts.get(client, ()))
    if mix is not None and mix < MIXED:
        return

    def collapsed(entry: Entry) -> bool:
        return entry.get("classes_seen", 2) > 1 and bool(entry["spread"] < COLLAPSED)

    streak = _streak(entries, collapsed, run.sustained())
    if streak:
        last = streak[-1]
        evidence = (
            f"1 − ‖mean of the unit features‖² = {last['spread']:.2g} with {last.get('classes_seen', 'several')} classes, "
            f"{len(streak)} epochs in a row: all images look alike to this encoder"
        )
        advice = "lower training.learning_rate or clip (training.clip_norm = 1); keep a term that pushes apart (supervised-contrastive)"
        yield Sign("problem", last["epoch"], last["spread"], COLLAPSED, evidence, advice)


def _mix(counts: Sequence[int]) -> float | None:
    """1 − Σ share²: the chance that two samples differ in class."""
    total = sum(counts)
    return 1 - sum((count / total) ** 2 for count in counts) if total else None


# --- clients ---------------------------------------------------------------------------------------------------------


@client_rule("never-learned", _unless("no epoch measured", "base"))
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


@client_rule("diverged", _unless("no epoch measured", "epoch"))
def diverged(run: Run, client: str) -> Iterator[Sign]:
    """The rails ended a client's training, dropped its alignment, or saw what no other rule here tells."""
    if client in run.stopped:
        epoch, why = run.stopped[client]
        advice = "put right the cause it names and run again; what was uploaded can be scored with oneround fuse"
        evidence = f"stopped after epoch {epoch} of {run.epochs}: {why}"
        yield Sign("problem", epoch, float(epoch), float(run.epochs), evidence, advice, "stopped")
    entries = run.series(client, "lambda_effective", "lambda_raw", "s")
    dropped = next(
        (entry for entry in entries if entry["lambda_effective"] == 0 < min(entry["lambda_raw"], entry["s"])), None
    )
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


# --- data ------------------------------------------------------------------------------------------------------------


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


# --- accuracy --------------------------------------------------------------------------------------------------------


def _few_snapshots(run: Run) -> str:
    return "" if len(run.curves.get(run.main_rule, {})) > 1 else "fewer than two snapshots (snapshots)"


@run_rule("past-its-peak", _few_snapshots)
def past_its_peak(run: Run) -> Iterator[Sign]:
    """The fused model was better at an earlier snapshot."""
    curve = run.curves[run.main_rule]
    last, best = max(curve), max(curve, key=lambda epoch: (curve[epoch], -epoch))
    lost = round(100 * (curve[best] - curve[last]), 6)
    if lost >= PAST_PEAK:
        evidence = (
            f"{run.main_rule} had {100 * curve[best]:.1f} % at epoch {best} and has {100 * curve[last]:.1f} % at epoch {last}, "
            f"{lost:.1f} points less (seen on test data)"
        )
        advice = f"train less (about {best} epochs), or find what drives accuracy down; choose the epoch on data that is not the test data"
        yield Sign("warning", last, lost, PAST_PEAK, evidence, advice)


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
    if fused[run.main_rule] < alone[best]:
        evidence = f"{run.main_rule} has {100 * fused[run.main_rule]:.1f} %, {best} alone {100 * alone[best]:.1f} %"
        advice = "try other rules on the same uploads: oneround fuse RUN --rule all"
        if fused[better] > alone[best]:
            advice = f"{better} has {100 * fused[better]:.1f} % on the same uploads: put it first in fusion"
        yield Sign("problem", end, fused[run.main_rule], alone[best], evidence, advice)
