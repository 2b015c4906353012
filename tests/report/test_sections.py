"""Sections of a report say what the record says, and leave out what is not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oneround.report import sections
from oneround.report.markup import EMPTY
from oneround.runs.record import RunRecord
from reports import Page


@pytest.fixture()
def record(reported_run: Path) -> RunRecord:
    return RunRecord.read(reported_run)


def test_a_commit_that_is_not_known_is_left_out(record: RunRecord) -> None:
    assert "under test" in sections.environment(record)
    unknown = sections.environment(replace(record, environment={**record.environment, "commit": None}))
    assert "commit" not in unknown and "None" not in unknown


def test_only_sections_with_content_are_in_a_report(record: RunRecord) -> None:
    names = [section.name for section in sections.sections(record)]
    assert names[:2] == ["result", "findings"] and "lambda" in names and "rounds" not in names
    unfinished = replace(record, result=None, measurements=type(record.measurements)(), partition={})
    rest = [section.name for section in sections.sections(unfinished)]
    assert not {"accuracy", "traffic", "classes", "mixes"} & set(rest) and "result" in rest


def test_a_finished_run_has_no_state_and_an_unfinished_one_says_how_far_it_came(record: RunRecord) -> None:
    assert record.result is not None
    assert sections.state(replace(record, result={**record.result, "remarks": []})) == EMPTY
    text = Page(sections.state(replace(record, result=None, stopped={"client_001": (2, "λ left its range")}))).text
    assert "Not finished" in text and "epoch 3 of 3" in text and "--resume" in text and "λ left its range" in text


def test_the_best_client_and_the_mean_of_all_stand_beside_the_rules(record: RunRecord) -> None:
    page, alone = Page(sections.result(record)), record.local_accuracy
    best = max(alone, key=lambda name: alone[name])
    assert page.row(f"best alone: {best}")[1] == f"{100 * alone[best]:.2f}"
    assert page.row("mean client alone")[1] == f"{100 * sum(alone.values()) / len(alone):.2f}"


def test_the_mean_over_each_clients_mix_is_that_of_the_clients(record: RunRecord) -> None:
    page = Page(sections.mixes(record))
    values = [float(page.row(client)[1]) for client in record.clients]
    assert float(page.row("mean")[1]) == pytest.approx(sum(values) / len(values), abs=0.01)


def test_the_partition_names_the_largest_and_the_smallest(record: RunRecord) -> None:
    sizes = {name: sum(row) for name, row in record.partition_counts.items()}
    text = Page(sections.partition(record)).text
    largest, smallest = max(sizes, key=lambda name: sizes[name]), min(sizes, key=lambda name: sizes[name])
    assert f"{largest} holds most ({sizes[largest]:,}), {smallest} least ({sizes[smallest]:,})" in text


def test_traffic_is_divided_by_clients_and_by_rounds(record: RunRecord) -> None:
    assert record.result is not None
    up, clients = record.result["bytes_up"], len(record.clients)
    assert Page(sections.traffic(record)).row("up (uploads)")[1:3] == [f"{up:,}", f"{round(up / clients):,}"]


def test_findings_are_those_of_the_diagnosis(record: RunRecord) -> None:
    text = Page(sections.findings(record)).text
    assert "epoch" in text and any(client in text for client in record.clients)
