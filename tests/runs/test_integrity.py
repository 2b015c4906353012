"""What is damaged is told from what is whole."""

from __future__ import annotations

import math
from typing import Any

import pytest

from oneround.config.load import checked
from oneround.errors import RecipeError
from oneround.runs.integrity import Content, EnvironmentContent, PartitionContent, ResultContent


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
