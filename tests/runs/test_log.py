"""The metrics log and its parser."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from oneround.runs.log import Measurements, MetricsLog, epoch_metrics, is_share, valid_event


def test_the_log_survives_a_torn_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert list(log) == []
    log.append([{"event": "epoch", "client": "a", "epoch": epoch} for epoch in (1, 2)])
    with log.path.open("a") as file:
        file.write('{"event": "ep')
    assert [event["epoch"] for event in log] == [1, 2]
    log.replace(event for event in list(log) if event["epoch"] == 2)
    assert log.path.read_text() == '{"event": "epoch", "client": "a", "epoch": 2}\n'


def snapshot(epoch: int, rule: str, accuracy: float, **more: Any) -> dict[str, Any]:
    return {"event": "snapshot", "epoch": epoch, "rule": rule, "accuracy": accuracy, **more}


def test_every_kind_of_event_is_filed() -> None:
    measured = Measurements.of(
        [
            {"event": "epoch", "epoch": 2, "client": "b", "base": 1.5, "trouble": ["weight"], "stage": "first"},
            {"event": "epoch", "epoch": 1, "client": "b", "base": 2.5},
            {"event": "epoch", "epoch": 1, "client": "a", "base": 3.5},
            {"event": "client", "epoch": 2, "client": "a", "accuracy": 0.4},
            snapshot(2, "iffi", 0.5, validation=0.6, seconds=0.1, elapsed=7.0),
            snapshot(2, "average", 0.3),
            {"event": "fusion", "epoch": 2, "rule": "iffi", "accepted": True, "error": 0.2},
            {"event": "steps", "epoch": 2, "client": "a", "done": 3},
        ]
    )
    assert [*measured.epochs] == ["a", "b"] and [*measured.epochs["b"]] == [1, 2], "in order"
    assert measured.epochs["b"][2] == {"epoch": 2, "base": 1.5, "trouble": ["weight"]}
    assert measured.curves == {"iffi": {2: 0.5}, "average": {2: 0.3}} and measured.validation == {"iffi": {2: 0.6}}
    assert measured.local_accuracy == {"a": {2: 0.4}} and measured.elapsed == {2: 7.0}
    assert measured.fusions == {"iffi": {2: {"accepted": True, "error": 0.2}}}


def test_a_snapshot_of_a_run_under_way_is_filed_like_its_lines() -> None:
    lines = [
        snapshot(2, "iffi", 0.5, validation=0.6, elapsed=3.0),
        snapshot(2, "average", 0.3),
        {"event": "client", "epoch": 2, "client": "a", "accuracy": 0.4},
        {"event": "fusion", "epoch": 2, "rule": "average", "accepted": True},
    ]
    summary = {"event": "snapshot", "epoch": 2, "when": "epoch 2", "seconds": 0.1, "left": 3, "accuracy": {"iffi": 0.5}}
    emitted = Measurements.of([{**summary, "logged": lines}])
    assert emitted == Measurements.of(lines) and emitted.fusions and emitted.elapsed
    assert Measurements.of([summary]) == Measurements(), "its lines count, the summary is to show"


def test_the_later_of_two_events_counts_and_damaged_ones_do_not() -> None:
    measured = Measurements()
    for event in (snapshot(1, "iffi", 0.1), snapshot(1, "iffi", 0.2), snapshot(1, "iffi", 7.0), {"event": "epoch"}):
        measured.add(event)
    assert measured == Measurements(curves={"iffi": {1: 0.2}})


TRACE = {"features": {"norm": {"a": 1.0}, "cosine": {"a · b": None}}}
EPOCH = {"event": "epoch", "client": "a", "epoch": 1}
SNAPSHOT = {"event": "snapshot", "rule": "iffi", "epoch": 1, "accuracy": 0.5}


@pytest.mark.parametrize("event", [EPOCH, SNAPSHOT, {**EPOCH, "gradients": TRACE}, {**SNAPSHOT, "validation": 1}])
def test_a_whole_event_stays_as_it_is(event: dict[str, Any]) -> None:
    assert valid_event(event) is event


@pytest.mark.parametrize(
    "event",
    [
        3,
        None,
        {**EPOCH, "epoch": "one"},
        {**EPOCH, "client": None},
        {**EPOCH, "event": None},
        {**EPOCH, "event": "client"},
        {**SNAPSHOT, "rule": 3},
        *({**SNAPSHOT, "accuracy": value} for value in (math.nan, 1.1, True, "0.5")),
    ],
)
def test_an_event_without_what_its_kind_promises_is_none(event: Any) -> None:
    assert valid_event(event) is None


@pytest.mark.parametrize(
    "gradients",
    [3, {"features": {}}, {"features": {"norm": {}, "cosine": {"a · b": "x"}}}, {"features": {"cosine": {}}}],
)
def test_damaged_parts_are_left_out_of_a_copy(gradients: Any) -> None:
    event = {**EPOCH, "gradients": gradients, "validation": 7}
    assert valid_event(event) == EPOCH and event["validation"] == 7


def test_metrics_of_an_epoch_are_numbers_trouble_and_gradients() -> None:
    event = {**EPOCH, "base": 1.5, "diverged": True, "name": "x", "trouble": ["weight", 3], "gradients": TRACE}
    assert epoch_metrics(event) == {"epoch": 1, "base": 1.5, "trouble": ["weight", "3"], "gradients": TRACE}


def test_shares() -> None:
    assert is_share(0) and is_share(1.0) and not is_share(-0.1) and not is_share(math.inf)
