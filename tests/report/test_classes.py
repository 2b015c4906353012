"""Accuracy and confusion by class are those of the result; what does not fit the classes is left out with a remark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from oneround.report.classes import CLASSES, classes
from oneround.report.markup import EMPTY
from oneround.runs.record import RunRecord
from reports import Page


def confusion(counts: list[list[int]], accuracy: float) -> dict[str, Any]:
    per_class = [row[at] / sum(row) if sum(row) else None for at, row in enumerate(counts)]
    return {"accuracy": accuracy, "per_class": per_class, "confusion": counts}


def with_rules(record: RunRecord, counts: list[list[int]]) -> RunRecord:
    """The record with this confusion under its first rule, and no clients."""
    assert record.result is not None
    names = tuple(f"class {number}" for number in range(len(counts)))
    result = {**record.result, "rules": {record.main_rule: confusion(counts, 0.5)}, "clients": {}}
    return replace(record, result=result, class_names=names)


def test_best_worst_and_what_is_taken_for_what(reported_run: Path) -> None:
    record = with_rules(RunRecord.read(reported_run), [[8, 2, 0], [0, 3, 7], [0, 0, 10]])
    text = Page(classes(record)).text
    assert "best on class 2 (100), worst on class 1 (30)" in text
    assert "21 of 30 test images right" in text
    assert "class 1 taken for class 2 7 times; class 0 taken for class 1 2 times" in text


def test_of_many_classes_the_worst_mistakes_are_listed(reported_run: Path) -> None:
    size = CLASSES + 1
    counts = [[9 if at == true else 0 for at in range(size)] for true in range(size)]
    counts[3][5] = 4
    page = Page(classes(with_rules(RunRecord.read(reported_run), counts)))
    assert page.row("class 3", "class 5") == ["class 3", "class 5", "4"]


def test_a_class_without_test_images_has_a_dash(reported_run: Path) -> None:
    page = Page(classes(with_rules(RunRecord.read(reported_run), [[5, 5], [0, 0]])))
    record = RunRecord.read(reported_run)
    assert page.row(record.main_rule) == [record.main_rule, "50.00", "50.00", "–"]


def test_a_result_of_other_classes_is_left_out(reported_run: Path) -> None:
    record = with_rules(RunRecord.read(reported_run), [[5, 5], [0, 0]])
    assert "Left out" in classes(replace(record, class_names=("only one",)))
    assert classes(replace(record, result=None)) == EMPTY
