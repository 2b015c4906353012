"""What is damaged is told from what is whole."""

from __future__ import annotations

import math
from typing import Any

import pytest

from oneround.config.load import checked
from oneround.errors import RecipeError
from oneround.runs.integrity import (
    Content,
    EnvironmentContent,
    PartitionContent,
    ResultContent,
    is_share,
    valid_entry,
    valid_event,
)

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


def test_an_entry_has_numbers_trouble_and_gradients() -> None:
    event = {**EPOCH, "base": 1.5, "diverged": True, "name": "x", "trouble": ["weight", 3], "gradients": TRACE}
    assert valid_entry(event) == {"epoch": 1, "base": 1.5, "trouble": ["weight", "3"], "gradients": TRACE}


def test_shares() -> None:
    assert is_share(0) and is_share(1.0) and not is_share(-0.1) and not is_share(math.inf)


def refusal(model: type[Content], content: Any) -> str:
    with pytest.raises(RecipeError) as refused:
        checked(model, content, "content")
    return str(refused.value)


SCORE = {"accuracy": 0.5, "confusion": [[1, 0], [0, 1]], "per_class": [1.0, None]}
RESULT = {"partition": "d", "remarks": [], "uploads": {}, "rules": {"iffi": SCORE}, "clients": {}}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"partition": 3}, "partition = 3: must be text"),
        ({"rules": {}, "clients": {"a": SCORE}}, "clients are scored but no rules"),
        ({"rules": []}, "rules = []: must be a mapping"),
        ({"rules": {"iffi": {**SCORE, "accuracy": 2}}}, "rules.iffi.accuracy = 2: must be ≤ 1"),
        ({"rules": {"iffi": {**SCORE, "accuracy": math.nan}}}, "rules.iffi.accuracy = NaN: must be finite"),
        ({"clients": {"a": {**SCORE, "confusion": [[1, 2]]}}}, "clients.a: confusion must be a square table"),
        ({"clients": {"a": {**SCORE, "confusion": [[1, -2], [0, 1]]}}}, "clients.a.confusion.0.1 = -2: must be ≥ 0"),
        ({"clients": {"a": {**SCORE, "per_class": [1.0]}}}, "per_class have an entry for each class"),
    ],
)
def test_a_fault_of_a_result_is_named(change: dict[str, Any], fault: str) -> None:
    assert fault in refusal(ResultContent, {**RESULT, **change})


def test_a_whole_result_may_have_more_keys() -> None:
    checked(ResultContent, {**RESULT, "bytes_up": 3, "rules": {"iffi": {**SCORE, "top5": 1.0}}})


def test_faults_of_a_partition_and_an_environment() -> None:
    partition = {"digest": "d", "class_counts": [[1, 2]], "shared_samples": 0}
    checked(PartitionContent, partition)
    for change in ({"class_counts": [[1.5]]}, {"class_counts": [[-1]]}, {"class_counts": []}, {"shared_samples": None}):
        assert next(iter(change)) in refusal(PartitionContent, {**partition, **change})
    assert refusal(PartitionContent, "ab") == 'content = "ab": must be a mapping of keys to values'
    checked(EnvironmentContent, {"device": "cpu", "packages": {}, "commit": None})
    assert refusal(EnvironmentContent, {"device": "cpu", "packages": {}}) == "commit: is required"
