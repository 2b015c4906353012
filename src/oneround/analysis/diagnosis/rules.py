"""The registry of diagnosis rules, and their findings with evidence and advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from oneround.formatting import without_infinity
from oneround.runs.log import EpochMetrics
from oneround.runs.record import RunRecord

Severity = Literal["problem", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")

SUSTAINED = 3  # epochs in a row: one can be an accident of its last batch, three are not
SUSTAINED_SHARE = 0.1  # of all epochs, where that is longer: three of five hundred are a passing phase


@dataclass(frozen=True)
class Finding:
    """One thing a rule found. The rule leaves out its own name and the client's, which `Rule.apply` fills in."""

    rule: str = field(default="", kw_only=True)
    severity: Severity
    client: str | None = field(default=None, kw_only=True)
    epoch: int | None
    value: float
    threshold: float
    """The limit that the value crossed."""
    evidence: str
    advice: str
    about: str = ""
    """What it is about, where a rule can find several things at one client."""

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


Precondition = Callable[[RunRecord], str]
"""Why a rule does not apply to a run; empty when it does."""
Check = TypeVar("Check", bound=Callable[..., Iterable[Finding]])


@dataclass(frozen=True)
class Rule:
    """A rule in the registry."""

    name: str
    precondition: Precondition
    check: Callable[..., Iterable[Finding]]
    """Findings in a run or, with `per_client`, at one client of a run."""
    per_client: bool

    def apply(self, run: RunRecord, clients: Iterable[str]) -> Iterator[Finding]:
        """Findings at these clients, or in the run where the rule checks it as a whole."""
        for client in clients if self.per_client else [None]:
            for finding in self.check(run, client) if self.per_client else self.check(run):
                yield replace(finding, rule=self.name, client=client)


RULES: list[Rule] = []


def client_rule(name: str, precondition: Precondition) -> Callable[[Check], Check]:
    """Register a rule that checks one client at a time, a function of the run and the client."""
    return partial(_register, name, precondition, True)


def run_rule(name: str, precondition: Precondition) -> Callable[[Check], Check]:
    """Register a rule that checks the run as a whole."""
    return partial(_register, name, precondition, False)


def _register(name: str, precondition: Precondition, per_client: bool, check: Check) -> Check:
    RULES.append(Rule(name, precondition, check, per_client))
    return check


def findings(run: RunRecord) -> list[Finding]:
    """Findings of all rules, the worst first."""
    return worst_first(each for rule in RULES if not rule.precondition(run) for each in rule.apply(run, run.trained))


def worst_first(all_findings: Iterable[Finding]) -> list[Finding]:
    return sorted(all_findings, key=lambda finding: SEVERITIES.index(finding.severity))


# --- helpers of the rules --------------------------------------------------------------------------------------------


def applied_lambda(entry: EpochMetrics) -> float:
    """The λ of an epoch's last step; older logs have only the λ of the next epoch."""
    value: float = entry.get("lambda_applied", entry["lambda_effective"])
    return value


def requires(*quantities: str, otherwise: str) -> Precondition:
    """Some client must have measured all these quantities in an epoch; `otherwise`: the reason why the rule does not apply."""
    return lambda run: "" if any(run.series(client, *quantities) for client in run.measurements.epochs) else otherwise


def sustained(run: RunRecord, *, long: bool = False) -> int:
    """How many epochs in a row a condition must hold; `long`: at least a share of the whole training."""
    share = math.ceil(SUSTAINED_SHARE * run.recipe.epochs) if long else 0
    return min(max(SUSTAINED, share), run.recipe.epochs)


def streak_of(
    entries: Sequence[EpochMetrics], holds: Callable[[EpochMetrics], bool], length: int
) -> Sequence[EpochMetrics]:
    """The first `length` epochs in a row for which `holds`; empty where there are none."""
    begun = 0
    for number, entry in enumerate(entries):
        if not holds(entry):
            begun = number + 1
        elif number + 1 - begun == length:
            return entries[begun : number + 1]
    return ()
