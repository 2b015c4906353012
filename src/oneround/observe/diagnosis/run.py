"""What rules look at and what they find: a run as it was measured so far, a finding with its evidence and advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from oneround.learning.alignment import instability_threshold
from oneround.recipe import Federated

Severity = Literal["problem", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")
Entry = Mapping[str, Any]

SUSTAINED = 3  # epochs in a row: one can be an accident of its last batch, three are not
SUSTAINED_SHARE = 0.1  # of all epochs, where that is longer: three of five hundred are a passing phase


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
    validation: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Accuracy by rule and epoch on images held back to choose by."""
    tested: Sequence[int] = ()
    """Test images of each class."""

    @property
    def epochs(self) -> int:
        return self.recipe.epochs

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


def acting(entry: Entry) -> float:
    """The λ that acted on the network in the last step of an epoch; older logs have only that of the epoch to come."""
    value: float = entry.get("lambda_applied", entry["lambda_effective"])
    return value


def unless(reason: str, *keys: str) -> Lacking:
    """These measured by somebody, or `reason` why there is nothing to judge."""
    return lambda run: "" if any(run.series(client, *keys) for client in run.entries) else reason


def streak_of(entries: Sequence[Entry], wrong: Callable[[Entry], bool], length: int) -> Sequence[Entry]:
    """The first so many entries in a row that are wrong."""
    begun = 0
    for number, entry in enumerate(entries):
        if not wrong(entry):
            begun = number + 1
        elif number + 1 - begun == length:
            return entries[begun : number + 1]
    return ()
