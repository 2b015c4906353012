"""Curves over epochs are those of the log; of many clients the largest are drawn, and the range of all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oneround.report import epochs
from oneround.report.epochs import CLIENTS, by_client
from oneround.report.markup import EMPTY
from oneround.runs.record import RunRecord
from reports import Page


@pytest.fixture()
def record(reported_run: Path) -> RunRecord:
    return RunRecord.read(reported_run)


def test_accuracies_and_lambda_are_those_of_the_log(record: RunRecord) -> None:
    accuracy, alignment = Page(epochs.accuracy(record)), Page(epochs.alignment(record))
    for epoch in (1, 2, 3):
        shown = [f"{100 * record.curves[rule][epoch]:.2f}" for rule in ("iffi", "average", "typicality-gated")]
        assert accuracy.row(str(epoch), *shown)
        raw = [f"{record.trace('lambda_raw')[client][epoch]:.4g}" for client in record.clients]
        assert alignment.row(str(epoch), *raw)


def test_the_pull_of_alignment_is_lambda_times_its_loss_over_the_rest(record: RunRecord) -> None:
    client = record.clients[0]
    of = {key: record.trace(key)[client][2] for key in ("lambda_effective", "align", "base")}
    pull = of["lambda_effective"] * of["align"] / of["base"]
    rows = [row for row in Page(epochs.alignment(record)).rows("2") if row[1] == f"{pull:.4g}"]
    assert len(rows) == 1


def test_every_term_of_the_loss_is_drawn_for_every_client(record: RunRecord) -> None:
    page = Page(epochs.losses(record))
    assert page.count("figure") == len(record.clients)
    heads = [table[0] for table in page.tables]
    assert all(head[1:-2] == [*record.recipe.objective.terms] for head in heads)
    cross_entropy = record.trace("cross-entropy")[record.clients[1]]
    assert page.tables[1][2][1] == f"{cross_entropy[2]:.4g}"


def test_cosines_are_between_alignment_and_the_rest(record: RunRecord) -> None:
    text = Page(epochs.cosines(record)).text
    assert "L_base and alignment, at the prototypes" in text and "mean over clients" in text


def test_of_many_clients_the_largest_are_drawn_and_the_range_of_all() -> None:
    names = [f"client_{number:03d}" for number in range(CLIENTS + 4)]
    trace = {name: {1: float(number), 2: -float(number)} for number, name in enumerate(names)}

    class Run:
        @staticmethod
        def largest(most: int) -> list[str]:
            return names[-most:]

    *lines, band = by_client(Run(), trace)  # type: ignore[arg-type]
    assert [line.name for line in lines] == names[-CLIENTS:]
    assert (band.name, band.low, band.high) == (f"all {len(names)} clients", {1: 0.0, 2: -11.0}, {1: 11.0, 2: 0.0})
    assert by_client(Run(), {name: trace[name] for name in names[-2:]})[-1].low is None  # type: ignore[arg-type]


def test_without_measurements_there_is_no_section(record: RunRecord) -> None:
    empty = replace(record, measurements=type(record.measurements)())
    assert epochs.alignment(empty) == epochs.losses(empty) == epochs.accuracy(empty) == epochs.cosines(empty) == EMPTY
