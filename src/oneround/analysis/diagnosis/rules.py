"""The registry of diagnosis rules, and their findings with evidence and advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from oneround.formatting import without_infinity
from oneround.runs.log import Entry
from oneround.runs.record import RunRecord

Severity = Literal["problem", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")

SUSTAINED = 3  # epochs in a row: one can be an accident of its last batch, three are not
SUSTAINED_SHARE = 0.1  # of all epochs, where that is longer: three of five hundred are a passing phase


@dataclass(frozen=True)
class Finding:
    """One thing a rule found. The rule leaves out its own name and the client's, which `Rule.look` fills in."""

    rule: str = field(default="", kw_only=True)
    severity: Severity
    client: str | None = field(default=None, kw_only=True)
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
        """Identifies a finding when it is found again with more epochs."""
        return self.rule, self.client, self.about, self.severity

    @property
    def where(self) -> str:
        """`client_002, epoch 14`"""
        return ", ".join([*([self.client] if self.client else []), *([f"epoch {self.epoch}"] if self.epoch else [])])

    @property
    def summary(self) -> str:
        """One line, as printed during a run."""
        return f"{self.severity}: {self.rule}{f' ({self.where})' if self.where else ''}: {self.evidence}"

    def plain(self) -> dict[str, Any]:
        """JSON-ready."""
        fields: dict[str, Any] = without_infinity(asdict(self))
        return fields


Lacking = Callable[[RunRecord], str]
Judge = TypeVar("Judge", bound=Callable[..., Iterable[Finding]])


@dataclass(frozen=True)
class Rule:
    """A rule in the registry."""

    name: str
    lacking: Lacking
    """Why it cannot judge a run; empty when it can."""
    judge: Callable[..., Iterable[Finding]]
    """Findings in a run or, if it judges clients, at one client of a run."""
    of_clients: bool

    def look(self, run: RunRecord, clients: Iterable[str]) -> Iterator[Finding]:
        """Findings at these clients, or in the run where the rule judges it as a whole."""
        if self.of_clients:
            yield from (
                replace(each, rule=self.name, client=client) for client in clients for each in self.judge(run, client)
            )
        else:
            yield from (replace(each, rule=self.name) for each in self.judge(run))


RULES: list[Rule] = []


def client_rule(name: str, lacking: Lacking) -> Callable[[Judge], Judge]:
    """Register a rule that judges one client at a time, a function of the run and the client."""
    return partial(_register, name, lacking, True)


def run_rule(name: str, lacking: Lacking) -> Callable[[Judge], Judge]:
    """Register a rule that judges the run as a whole."""
    return partial(_register, name, lacking, False)


def _register(name: str, lacking: Lacking, of_clients: bool, judge: Judge) -> Judge:
    RULES.append(Rule(name, lacking, judge, of_clients))
    return judge


def findings(run: RunRecord) -> list[Finding]:
    """Findings of all rules, the worst first."""
    return worst_first(each for rule in RULES if not rule.lacking(run) for each in rule.look(run, run.trained))


def worst_first(all_findings: Iterable[Finding]) -> list[Finding]:
    return sorted(all_findings, key=lambda finding: SEVERITIES.index(finding.severity))


# --- what rules share ------------------------------------------------------------------------------------------------


def acting(entry: Entry) -> float:
    """The λ that acted on the network in the last step of an epoch; older logs have only the λ of the next epoch."""
    value: float = entry.get("lambda_applied", entry["lambda_effective"])
    return value


def unless(reason: str, *quantities: str) -> Lacking:
    """Some client measured all of these, or `reason` why there is nothing to judge."""
    return lambda run: "" if any(run.series(client, *quantities) for client in run.measurements.epochs) else reason


def sustained(run: RunRecord, *, long: bool = False) -> int:
    """How many epochs in a row something must last; `long`: at least a share of the whole training."""
    share = math.ceil(SUSTAINED_SHARE * run.recipe.epochs) if long else 0
    return min(max(SUSTAINED, share), run.recipe.epochs)


def streak_of(entries: Sequence[Entry], wrong: Callable[[Entry], bool], length: int) -> Sequence[Entry]:
    """The first `length` entries in a row that are wrong; empty where there are none."""
    begun = 0
    for number, entry in enumerate(entries):
        if not wrong(entry):
            begun = number + 1
        elif number + 1 - begun == length:
            return entries[begun : number + 1]
    return ()
