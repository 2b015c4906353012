"""Comparisons that can be trusted: the statistics are right, pairs are pairs, and runs that do not compare are refused."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from oneround.compare import Group, compare
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.finished import find_runs, keep
from oneround.layouts import gradients_sheet, lambda_sheets, methods_sheet, peaks_sheet, rounds_sheet
from oneround.observe.formats import Sheet, written
from oneround.observe.statistics import Summary, compared, holm, p_value, paired, pairs_needed, power
from oneround.reading import load
from oneround.simulate import run

# --- statistics ------------------------------------------------------------------------------------------------------


def sweep_of(random: np.random.RandomState, partitions: int, gains: list[float], noise: float) -> list[Summary]:
    """Differences to a baseline: the partition moves everybody by ±10 points, each run by its own noise."""
    luck = 60 + 10 * random.randn(partitions)
    base = luck + noise * random.randn(partitions)
    return [paired(luck + gain + noise * random.randn(partitions), base) for gain in gains]


def test_false_alarms_stay_at_the_nominal_rate() -> None:
    random = np.random.RandomState(1)
    alone = [compared(sweep_of(random, 5, [0.0], 2.0))[0].real for _ in range(4000)]
    assert abs(np.mean(alone) - 0.05) < 3 * math.sqrt(0.05 * 0.95 / 4000)
    family = [any(each.real for each in compared(sweep_of(random, 5, [0.0] * 6, 2.0))) for _ in range(4000)]
    assert np.mean(family) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)
    careless = [
        any((each.p or 1) < 0.05 for each in compared(sweep_of(random, 5, [0.0] * 6, 2.0))) for _ in range(1000)
    ]
    assert np.mean(careless) > 0.12, "without a correction there would be many"


@pytest.mark.parametrize(("partitions", "noise"), [(5, 2.0), (10, 2.0), (5, 1.0)])
def test_power_is_the_predicted_one(partitions: int, noise: float) -> None:
    random = np.random.RandomState(2)
    seen = np.mean([compared(sweep_of(random, partitions, [3.0], noise))[0].real for _ in range(3000)])
    predicted = power(noise * math.sqrt(2), 3.0, partitions)
    assert abs(seen - predicted) < 3 * math.sqrt(predicted * (1 - predicted) / 3000) + 1e-9


def test_the_number_of_pairs_asked_for_is_the_smallest_that_suffices() -> None:
    for deviation, difference in ((4.0, 1.0), (2.0, 3.0), (7.0, 0.5), (0.1, 5.0)):
        needed = pairs_needed(deviation, difference)
        assert power(deviation, difference, needed) >= 0.8
        assert needed == 2 or power(deviation, difference, needed - 1) < 0.8
    assert pairs_needed(0.0, 1.0) == 2
    assert pairs_needed(100.0, 0.01) == 10_000


def test_tests_and_corrections_are_the_textbooks() -> None:
    random = np.random.RandomState(3)
    for n in (2, 3, 8, 30):
        values = random.randn(n) + 0.4
        assert p_value(Summary(tuple(values))) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert p_value(Summary((1.0,))) is None
    assert p_value(Summary((0.0, 0.0))) == 1.0 and p_value(Summary((2.0, 2.0))) == 0.0
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_verdicts_in_words() -> None:
    clear, vague, single = compared(
        [Summary((3.0, 3.2, 2.9, 3.1, 3.0)), Summary((2.0, -3.0, 1.5, 4.0, -2.0)), Summary((0.4,))]
    )
    assert clear.verdict().startswith("better by 3.0 points (p = ")
    needed = pairs_needed(float(np.std([2.0, -3.0, 1.5, 4.0, -2.0], ddof=1)), 1.0)
    assert vague.verdict() == f"not distinguishable with 5 pairs; about {needed} would be needed to see 1 point"
    assert "says nothing about others" in single.verdict()
    assert clear.effect == pytest.approx(3.04 / np.std([3.0, 3.2, 2.9, 3.1, 3.0], ddof=1))


# --- runs ------------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "model.encoder": {"kind": "cnn", "width": 4}, "training.batch_size": 64, "training.epochs": 2, "snapshots": 1, "partition.clients": 3,
    "partition.alpha": 0.3, "fusion": ["iffi", "average"], "local.workers": 1, "trace.every": 1,
}  # fmt: skip


def made(folder: Path, digits: Dataset, method: str, partition: int, seed: int = 1, **changes: Any) -> None:
    seeds = {"seeds.partition": partition, "seeds.initialisation": seed, "seeds.training": seed}
    given = {**SMALL, **seeds, **{key.replace("__", "."): value for key, value in changes.items()}}
    run(load(method, given.items()), folder / f"{method}-{partition}-{seed}-{len(list(folder.iterdir()))}", data=digits)


@pytest.fixture(scope="module")
def grid(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fafi and v9 on partitions 1 and 2, fafi twice on each."""
    folder = tmp_path_factory.mktemp("grid")
    for partition in (1, 2):
        made(folder, digits, "fafi", partition, 1)
        made(folder, digits, "fafi", partition, 2)
        made(folder, digits, "v9", partition, 1)
    return folder


def only(groups: list[Group]) -> Group:
    (group,) = groups
    return group


def test_repeats_are_averaged_before_pairs_are_made(grid: Path) -> None:
    runs = find_runs([grid])
    group = only(compare(runs, baseline="v4"))
    fafi, entropy = group.entries
    assert (fafi.method, entropy.method, group.baseline.method) == ("fafi", "etf-entropy", "fafi")
    by_hand: dict[str, list[float]] = {}
    for each in runs:
        if each.method == "fafi":
            by_hand.setdefault(each.result.partition, []).append(100 * each.result.rules["iffi"])
    assert all(len(values) == 2 for values in by_hand.values())
    assert dict(fafi.accuracy) == pytest.approx({digest: np.mean(values) for digest, values in by_hand.items()})
    tested = group.comparisons[entropy.name]
    wanted = stats.ttest_rel(list(entropy.accuracy.values()), list(fafi.accuracy.values()))
    assert len(tested.difference.values) == 2 and tested.p == pytest.approx(wanted.pvalue)
    assert group.seeds == (1, 2) and group.repeats == 2


def test_runs_on_other_partitions_are_refused(grid: Path, digits: Dataset, tmp_path: Path) -> None:
    made(tmp_path, digits, "v7", 1)
    with pytest.raises(
        RecipeError,
        match=r"etf · iffi and fafi · iffi were not run on the same partitions \(1 in common, 1 not\).*--common",
    ):
        compare(find_runs([grid, tmp_path]))
    group = only(compare(find_runs([grid, tmp_path]), common=True))
    assert group.seeds == (1,) and all(len(entry.accuracy) == 1 for entry in group.entries)
    (tmp_path / "other").mkdir()
    made(tmp_path / "other", digits, "v8", 5)
    with pytest.raises(RecipeError, match="no partition is common"):
        compare(find_runs([grid, tmp_path / "other"]), common=True)


def test_settings_are_grouped_and_variants_named(digits: Dataset, tmp_path: Path) -> None:
    for alpha in (0.3, 5.0):
        for value in (1.0, 5.0):
            made(tmp_path, digits, "v7", 1, partition__alpha=alpha, alignment__weight__value=value)
    groups = compare(find_runs([tmp_path]))
    assert sorted(group.setting for group in groups) == ["alpha=0.3", "alpha=5.0"]
    assert [[entry.method for entry in group.entries] for group in groups] == [["etf value=1.0", "etf value=5.0"]] * 2


def test_tables_in_every_form(grid: Path) -> None:
    group = only(compare(find_runs([grid]), rule="all", baseline="average"))
    assert group.baseline.rule == "average" and len(group.entries) == 8
    sheet = methods_sheet(group, 1.0)
    assert written([sheet], "md").count("| fafi · ") == 4
    rows = list(csv.reader(io.StringIO(written([sheet], "csv"))))
    assert rows[0][0] == "method" and len(rows) == 9 and all(len(row) == len(rows[0]) for row in rows)
    (told,) = json.loads(written([sheet], "json"))
    assert told["rows"][0]["by_partition"] == pytest.approx(dict(group.entries[0].accuracy))
    latex = written([sheet], "tex")
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
    assert sheet.title == "λ of etf-entropy" and len(sheet.rows) == 2 and len(sheet.heads) == 4
    assert sheet.rows[0][1] == sheet.rows[1][1]


def test_a_record_is_compared_like_its_folders(grid: Path, tmp_path: Path) -> None:
    runs = find_runs([grid])
    keep(runs, tmp_path / "kept.json")
    again = find_runs([tmp_path / "kept.json"])
    assert len(again) == len(runs) == 6
    for layout in (
        lambda group: methods_sheet(group, 1.0), rounds_sheet, peaks_sheet, gradients_sheet, lambda group: lambda_sheets(group)[0],
    ):  # fmt: skip
        rule = None if layout is rounds_sheet or layout is peaks_sheet else "all"
        then, now = (layout(only(compare(each, "v4", rule))) for each in (runs, again))
        assert (then.heads, then.rows, then.notes) == (now.heads, now.rows, now.notes) and then.rows
    for text, fault in (("[1]", "not a record"), ('{"format": "other"}', "format 'other'"), ("{", "not a record")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(RecipeError, match=fault):
            find_runs([tmp_path / "bad.json"])


def test_what_is_not_asked_for_is_left_out(grid: Path) -> None:
    group = only(compare(find_runs([grid]), rule="all", only=["v9"]))
    assert {entry.method for entry in group.entries} == {"etf-entropy"}
    sheet = methods_sheet(group, 1.0)
    assert sheet.heads[0] == "rule" and [row[0] for row in sheet.rows] == [
        "iffi", "average", "best client alone", "mean client alone",
    ]  # fmt: skip
    alone = [100 * max(each.result.clients.values()) for each in find_runs([grid]) if each.method == "etf-entropy"]
    assert sorted(group.entries[2].summary.values) == pytest.approx(sorted(alone))
    with pytest.raises(RecipeError, match=r"--method etf: not among what is compared \(fafi, etf-entropy\)"):
        compare(find_runs([grid]), only=["etf"])


def test_peaks_and_angles(grid: Path) -> None:
    group = only(compare(find_runs([grid])))
    every = [each for entry in group.entries for each in entry.runs]
    for row, each in zip(peaks_sheet(group).rows, every, strict=True):
        curve = each.result.curves["iffi"]
        assert row[6] == f"{100 * (max(curve.values()) - curve[2]):.1f}" and (row[2] != "") == (
            each.method == "etf-entropy"
        )
    angles = {(row[0], row[1]) for row in gradients_sheet(group).rows}
    assert ("etf-entropy", "base · alignment at prototypes") in angles
    assert all(-1 <= float(row[2]) <= 1 for row in gradients_sheet(group).rows)


def test_words_that_mean_nothing_are_refused(grid: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--baseline fafy: not among what is compared; did you mean 'fafi'"):
        compare(find_runs([grid]), baseline="fafy")
    with pytest.raises(RecipeError, match="no rule 'typical' in its runs"):
        compare(find_runs([grid]), rule="typical")
    with pytest.raises(RecipeError, match="no finished run"):
        find_runs([tmp_path])
    with pytest.raises(RecipeError, match="no such folder"):
        find_runs([tmp_path / "nowhere"])


def test_a_cell_cannot_break_a_table() -> None:
    sheet = Sheet("t", ["a", "b"], [["x|y", "1 & 2"]])
    assert r"x\|y" in sheet.markdown() and r"1 \& 2" in sheet.latex()
