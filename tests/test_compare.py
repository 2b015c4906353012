"""Comparisons that can be trusted: the statistics are right, pairs are pairs, and runs that do not compare are refused."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from oneround.compare import Group, compare
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.finished import find_runs, keep
from oneround.layouts import goals_sheet, gradients_sheet, lambda_sheets, methods_sheet, peaks_sheet, rounds_sheet
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
    assert p_value(Summary((0.0, 0.0))) == 1.0 and p_value(Summary((2.0, 2.0))) == 0.5
    assert p_value(Summary((2.0,) * 8)) == pytest.approx(stats.binomtest(8, 8).pvalue)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_verdicts_in_words() -> None:
    clear, vague, single = compared(
        [Summary((3.0, 3.2, 2.9, 3.1, 3.0)), Summary((2.0, -3.0, 1.5, 4.0, -2.0)), Summary((0.4,))]
    )
    assert clear.verdict().startswith("better by 3.0 points (p = ")
    needed = pairs_needed(float(np.std([2.0, -3.0, 1.5, 4.0, -2.0], ddof=1)), 1.0)
    assert (
        compared([vague.difference])[0].verdict()
        == f"not distinguishable with 5 pairs; about {needed} would be needed to see 1 point"
    )
    assert "says nothing about others" in single.verdict()
    assert clear.effect == pytest.approx(3.04 / np.std([3.0, 3.2, 2.9, 3.1, 3.0], ddof=1))


def test_what_several_comparisons_cost_is_counted_in_pairs() -> None:
    vague = Summary((2.0, -3.0, 1.5, 4.0, -2.0))
    needed = pairs_needed(float(np.std(vague.values, ddof=1)), 1.0, 0.05 / 6)
    assert needed > pairs_needed(float(np.std(vague.values, ddof=1)), 1.0)
    assert f"; about {needed} would be needed" in compared([vague] * 6)[0].verdict()
    assert power(2.0, 3.0, 8, 0.05 / 6) == pytest.approx(
        stats.nct.sf(stats.t.isf(0.05 / 12, 7), 7, 3.0 / 2.0 * math.sqrt(8)), abs=1e-3
    )
    assert all(
        0 <= power(1.0, shift, pairs, level) <= 1
        for shift in (3.0, 20.0, 90.0)
        for pairs in (2, 3, 5)
        for level in (0.05, 0.0025)
    )


def test_verdicts_promise_no_more_than_is_known() -> None:
    (close,) = compared([Summary((0.1, -0.1, 0.05))])
    assert close.verdict() == "not distinguishable with 3 pairs, enough to see 1 point"
    assert (
        close.verdict(0.0001)
        == "not distinguishable with 3 pairs; more than 10,000 would be needed to see 0.0001 points"
    )
    (same,) = compared([Summary((2.0, 2.0 + 1e-13))])
    assert not same.real and same.effect is None
    assert same.verdict() == "+2.0 on each of 2 partitions: too few to say how much it varies"


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


def test_runs_that_train_or_score_otherwise_are_no_repeats(digits: Dataset, tmp_path: Path) -> None:
    made(tmp_path, digits, "fafi", 1, training__epochs=1)
    made(tmp_path, digits, "fafi", 1, training__epochs=1, rails__largest_weight=7.0)
    made(tmp_path, digits, "fafi", 1, training__epochs=1, evaluation__unnormalised=True)
    group = only(compare(find_runs([tmp_path])))
    assert len(group.entries) == 3 and group.repeats == 1


def test_a_run_given_twice_counts_once(grid: Path, tmp_path: Path) -> None:
    keep(find_runs([grid]), tmp_path / "kept.json")
    assert len(find_runs([tmp_path / "kept.json", grid])) == 6
    assert only(compare(find_runs([grid, tmp_path / "kept.json"]))).repeats == 2


def test_what_was_changed_for_one_method_only_is_told(grid: Path) -> None:
    def told(**changes: Any) -> list[str]:
        runs = find_runs([grid])
        changed = [replace(run, keys={**run.keys, **(changes if run.method == "fafi" else {})}) for run in runs]
        return [remark for remark in only(compare(changed)).remarks if "differ" in remark]

    assert told() == []
    assert told(**{"training.learning_rate": 0.001}) == [
        "methods differ in training.learning_rate: fafi 0.001, etf-entropy 0.05"
    ]
    assert told(**{"training.augment.flip": 0.5}) == [
        "methods differ in training.augment.flip: fafi 0.5, etf-entropy 0.0"
    ]
    assert told(**{"trace.every": 7, "alignment": "none"}) == []


def test_one_method_alone_is_compared_with_nothing(grid: Path) -> None:
    sheet = methods_sheet(only(compare(find_runs([grid]), only=["v9"])), 1.0)
    assert not any("Holm" in note for note in sheet.notes)


def test_a_result_without_its_recipe_is_told(grid: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(grid, tmp_path / "grid")
    next((tmp_path / "grid").rglob("recipe.yaml")).unlink()
    assert len(find_runs([tmp_path / "grid"])) == 5
    assert "result.json: left out, there is no recipe.yaml beside it" in caplog.text


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
    (named,) = lambda_sheets(replace(group, setting="α = 0.05"))
    assert named.title == "λ of etf-entropy, α = 0.05"
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


def test_how_soon_a_method_is_how_good(grid: Path) -> None:
    group = compare(find_runs([grid]))[0]
    entry = group.entries[0]
    curve = {epoch: 100 * value for epoch, value in entry.runs[0].result.curves[entry.rule].items()}
    low, high = min(curve.values()), max(max(run.result.curves[entry.rule].values()) for run in entry.runs) * 100
    sheet = goals_sheet(group, [low / 2, high + 0.01])
    row = next(row for row in sheet.rows if row[0] == group.short(entry))
    assert row[3].startswith(f"{min(curve)} (") and row[3].endswith(" s)") and row[4] == "never"
    assert float(row[1]) >= float(row[2])


def test_in_several_rounds_the_first_rule_is_part_of_the_method(digits: Dataset, tmp_path: Path) -> None:
    small = {"rounds": 2, "training.schedule": "constant", "training.milestones": [], "partition.clients": 2}
    for rate in (0.01, 0.02):
        taught = {
            "kind": "taught",
            "learning_rate": rate,
            "teacher": {"encoder": {"kind": "cnn", "width": 4}, "epochs": 1},
        }
        made(tmp_path, digits, "fedavg+taught", 1, **small, fusion=[taught, "average"])
    names = [entry.method for entry in only(compare(find_runs([tmp_path]), rule="average")).entries]
    assert names == ["fedavg+taught learning_rate=0.01", "fedavg+taught learning_rate=0.02"]


def test_growth_is_the_last_epoch_over_the_first_of_any_client(grid: Path) -> None:
    raw = {"a": {1: 1.0, 2: 90.0, 3: 50.0}, "b": {1: 100.0, 2: 300.0, 3: 200.0}, "c": {1: 0.0, 2: 1.0, 3: 2.0}}
    runs = [replace(each, traces={"lambda_raw": raw}) for each in find_runs([grid])]
    assert {tuple(row[2:4]) for row in peaks_sheet(only(compare(runs))).rows} == {("100 → 200", "× 50")}


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
    plain = Sheet("t", ["λ first → last"], [["× 3, Δ {1} $2 a^b ~ \\"]]).latex()
    assert plain.isascii() and r"\{1\} \$2" in plain


def test_several_tables_in_one_file_are_told_apart() -> None:
    both = [Sheet(f"α = {alpha}, five", ["a"], [["1"]]) for alpha in (0.05, 0.5)]
    assert written(both, "csv") == '"α = 0.05, five"\na\n1\n\n"α = 0.5, five"\na\n1\n'
    assert written(both[:1], "csv") == "a\n1\n"
