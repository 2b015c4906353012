"""The registry of rules, and what rules share."""

from __future__ import annotations

import math
from pathlib import Path

from diagnosis.doctored import PLAIN, history, recipe_of, record_of
from oneround.analysis.diagnosis import RULES, Finding, findings
from oneround.analysis.diagnosis.rules import applied_lambda, requires, streak_of, sustained, worst_first


def test_every_rule_has_a_test() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert all(f'"{rule.name}"' in text for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES) == 11


def test_findings_come_worst_first_and_are_json_ready() -> None:
    made = [
        Finding(severity, 2, math.inf, 1.0, "e", "d", rule="r", client="a")
        for severity in ("note", "problem", "warning")
    ]
    assert [each.severity for each in worst_first(made)] == ["problem", "warning", "note"]
    assert made[0].plain()["value"] is None and made[0].plain()["threshold"] == 1.0
    assert made[0].summary == "note: r (a, epoch 2): e"


def test_a_stopped_client_without_an_epoch_is_looked_at() -> None:
    run = record_of(PLAIN, {"a": [{"epoch": 1}]})
    object.__setattr__(run, "stopped", {"b": (0, "out of range")})
    assert [(each.rule, each.client) for each in findings(run)] == [("diverged", "b")]


def test_a_streak_is_the_first_so_many_in_a_row() -> None:
    entries = [{"epoch": epoch, "bad": epoch in (1, 2, 4, 5, 6, 7)} for epoch in range(1, 9)]
    assert [entry["epoch"] for entry in streak_of(entries, lambda entry: entry["bad"], 3)] == [4, 5, 6]
    assert streak_of(entries, lambda entry: entry["bad"], 5) == ()


def test_how_long_something_must_last() -> None:
    long, short = record_of(recipe_of("fafi", 45)), record_of(recipe_of("fafi", 2))
    assert (sustained(long), sustained(long, long=True), sustained(short, long=True)) == (3, 5, 2)


def test_a_rule_says_what_it_lacks_until_one_client_has_all_of_it() -> None:
    precondition = requires("base", "align", otherwise="nothing measured")
    assert (
        precondition(history(PLAIN, base=1.0)) == "nothing measured"
        and precondition(history(PLAIN, base=1.0, align=1.0)) == ""
    )
    assert (
        applied_lambda({"lambda_effective": 2.0}) == 2.0
        and applied_lambda({"lambda_effective": 2.0, "lambda_applied": 3.0}) == 3.0
    )
