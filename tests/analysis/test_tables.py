"""Layouts of a comparison: what they show is what was measured."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import small_recipe
from grids import only
from oneround.analysis.comparison import compare, of_methods
from oneround.analysis.sheets import render
from oneround.analysis.tables import (
    anchors_sheet,
    costs_sheet,
    goals_sheet,
    gradients_sheet,
    lambda_sheets,
    methods_sheet,
    peaks_sheet,
    rounds_sheet,
)
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.formatting import format_bytes
from oneround.runs.archive import find_runs, keep
from oneround.simulate import run


def test_one_method_alone_is_compared_with_nothing(grid: Path) -> None:
    sheet = methods_sheet(only(compare(find_runs([grid]), only=["v9"])), 1.0)
    assert not any("Holm" in note for note in sheet.notes)


def test_tables_in_every_form(grid: Path) -> None:
    group = only(compare(find_runs([grid]), rule="all", baseline="average"))
    assert group.baseline.rule == "average" and len(group.entries) == 8
    sheet = methods_sheet(group, 1.0)
    assert render([sheet], ".md").count("| fafi · ") == 4
    rows = list(csv.reader(io.StringIO(render([sheet], ".csv"))))
    assert rows[0][0] == "method" and len(rows) == 9 and all(len(row) == len(rows[0]) for row in rows)
    (content,) = json.loads(render([sheet], ".json"))
    assert content["rows"][0]["by_partition"] == pytest.approx(dict(group.entries[0].accuracy))
    latex = render([sheet], ".tex")
    assert latex.count(r"\\") == 9 and r"$\pm$ 95 \%" in latex
    assert len(sheet.verdicts()) == 8


def test_the_layouts_of_the_documents(grid: Path) -> None:
    group = only(compare(find_runs([grid])))
    rounds = rounds_sheet(group)
    assert rounds.heads == ["epoch", "fafi", "etf-entropy", "Δ etf-entropy"] and [row[0] for row in rounds.rows] == [
        "1",
        "2",
    ]
    last = rounds.rows[-1]
    assert float(last[3]) == pytest.approx(float(last[2]) - float(last[1]), abs=0.011)
    assert float(last[2]) == pytest.approx(group.entries[1].summary.mean, abs=0.006)
    (sheet,) = lambda_sheets(group)
    (named,) = lambda_sheets(replace(group, setting="α = 0.05"))
    assert named.title == "λ of etf-entropy, α = 0.05"
    assert sheet.title == "λ of etf-entropy" and len(sheet.rows) == 2 and len(sheet.heads) == 4
    assert sheet.rows[0][1] == sheet.rows[1][1]


def test_what_is_not_asked_for_is_left_out(grid: Path) -> None:
    group = only(compare(find_runs([grid]), rule="all", only=["v9"]))
    assert {entry.method for entry in group.entries} == {"etf-entropy"}
    sheet = methods_sheet(group, 1.0)
    assert sheet.heads[0] == "rule" and [row[0] for row in sheet.rows] == [
        "iffi", "average", "best client alone", "mean client alone",
    ]  # fmt: skip
    alone = [100 * max(each.local_accuracy.values()) for each in find_runs([grid]) if each.method == "etf-entropy"]
    assert sorted(group.entries[2].summary.values) == pytest.approx(sorted(alone))
    local = [[*each.local_accuracy.values()] for each in find_runs([grid]) if each.method == "etf-entropy"]
    means = [100 * sum(values) / len(values) for values in local]
    assert sorted(group.entries[3].summary.values) == pytest.approx(sorted(means))
    with pytest.raises(RecipeError, match=r"--method etf: not among what is compared \(fafi, etf-entropy\)"):
        compare(find_runs([grid]), only=["etf"])


def test_where_prototypes_end_is_a_table(grid: Path) -> None:
    group = only(compare(find_runs([grid])))
    runs = [each for entry in group.entries for each in entry.runs if each.method == "etf-entropy"]
    rows = anchors_sheet(group).rows
    assert len(rows) == len(runs) > 0
    for row, each in zip(rows, runs, strict=True):
        for cell, name in ((row[2], "anchor_cosine"), (row[4], "prototype_norm"), (row[5], "align")):
            ends = [np.mean([trace[end(trace)] for trace in each.trace(name).values()]) for end in (min, max)]
            assert cell == " → ".join(f"{value:.3f}" for value in ends)
        assert row[3] == f"{min(trace[max(trace)] for trace in each.trace('anchor_cosine').values()):.3f}"
        assert row[6] == f"{100 * each.accuracy['iffi']:.1f}"
    with pytest.raises(RecipeError, match="traced where its prototypes are"):
        anchors_sheet(only(compare(find_runs([grid]), only=["fafi"])))


def test_peaks_and_angles(grid: Path) -> None:
    group = only(compare(find_runs([grid])))
    every = [each for entry in group.entries for each in entry.runs]
    for row, each in zip(peaks_sheet(group).rows, every, strict=True):
        curve = each.curves["iffi"]
        assert row[6] == f"{100 * (max(curve.values()) - curve[2]):.1f}" and (row[2] != "") == (
            each.method == "etf-entropy"
        )
    angles = {(row[0], row[1]) for row in gradients_sheet(group).rows}
    assert ("etf-entropy", "base · alignment at prototypes") in angles
    assert all(-1 <= float(row[2]) <= 1 for row in gradients_sheet(group).rows)


def test_how_soon_a_method_is_how_good(grid: Path) -> None:
    group = compare(find_runs([grid]))[0]
    entry = group.entries[0]
    curve = {epoch: 100 * value for epoch, value in entry.runs[0].curves[entry.rule].items()}
    low, high = min(curve.values()), max(max(run.curves[entry.rule].values()) for run in entry.runs) * 100
    sheet = goals_sheet(group, [low / 2, high + 0.01])
    row = next(row for row in sheet.rows if row[0] == group.short(entry))
    assert row[3].startswith(f"{min(curve)} (") and row[3].endswith(" s)") and row[4] == "never"
    assert float(row[1]) >= float(row[2])


def test_growth_is_the_last_epoch_over_the_first_of_any_client(grid: Path) -> None:
    raw = {"a": {1: 1.0, 2: 90.0, 3: 50.0}, "b": {1: 100.0, 2: 300.0, 3: 200.0}, "c": {1: 0.0, 2: 1.0, 3: 2.0}}
    epochs = {
        client: {epoch: {"epoch": epoch, "lambda_raw": value} for epoch, value in by_epoch.items()}
        for client, by_epoch in raw.items()
    }
    runs = [replace(each, measurements=replace(each.measurements, epochs=epochs)) for each in find_runs([grid])]
    assert {tuple(row[2:4]) for row in peaks_sheet(only(compare(runs))).rows} == {("100 → 200", "× 50")}


def test_accuracy_and_its_price_of_runs_in_any_setting(digits: Dataset, tmp_path: Path) -> None:
    one_machine = small_recipe(
        "fedavg", partition__clients=1, rounds=1, training__schedule="constant", training__milestones=[]
    )
    rounds = small_recipe(
        "fedavg",
        partition__clients=3,
        rounds=2,
        local__workers=1,
        training__schedule="constant",
        training__milestones=[],
    )
    for name, recipe in (
        ("single", one_machine),
        ("rounds", rounds),
        ("plain", small_recipe(partition__clients=3, local__workers=1)),
    ):
        run(recipe, tmp_path / name, data=digits)
    runs = find_runs([tmp_path])
    keep(runs, tmp_path / "kept.json")
    for found in (runs, find_runs([tmp_path / "kept.json"])):
        sheet = costs_sheet(found)
        rows = {(row[0], row[1]): row for row in sheet.rows}
        assert {key: row[3] for key, row in rows.items()} == {
            ("fedavg", "3"): "2 × 1", ("fedavg", "1"): "1 × 1", ("fafi", "3"): "1 × 1",
        }  # fmt: skip
        result = json.loads((tmp_path / "rounds" / "result.json").read_text())
        row, score = rows["fedavg", "3"], next(iter(result["rules"].values()))
        assert row[4:7] == [f"{100 * score['accuracy']:.1f}", f"{100 * score['top5']:.1f}", f"{score['loss']:.3f}"]
        assert row[7:9] == [format_bytes(result["bytes_down"]), format_bytes(result["bytes_up"])]
        assert float(row[9]) >= 0
        (own,) = [each for each in sheet.data if each["clients"] == 1]
        assert own["bytes_up"] == sum(
            each["up"] for each in json.loads((tmp_path / "single" / "result.json").read_text())["traffic"].values()
        )
    assert [row[0] for row in costs_sheet(of_methods(runs, ["v4"])).rows] == ["fafi"]
    with pytest.raises(RecipeError, match=r"--method v9: not among what is compared \(fafi, fedavg\)|fedavg, fafi"):
        of_methods(runs, ["v9"])
