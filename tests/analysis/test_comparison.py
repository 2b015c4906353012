"""Comparisons that can be trusted: pairs are pairs, and runs that do not compare are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from grids import made, only
from oneround.analysis.comparison import compare
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.runs.archive import find_runs

pytestmark = pytest.mark.slow


def test_repeats_are_averaged_before_pairs_are_made(grid: Path) -> None:
    runs = find_runs([grid])
    group = only(compare(runs, baseline="v4"))
    fafi, entropy = group.entries
    assert (fafi.method, entropy.method, group.baseline.method) == ("fafi", "etf-entropy", "fafi")
    by_hand: dict[str, list[float]] = {}
    for each in runs:
        if each.method == "fafi":
            by_hand.setdefault(each.partition_digest, []).append(100 * each.accuracy["iffi"])
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


def test_transductive_scores_beside_others_make_no_other_method(digits: Dataset, tmp_path: Path) -> None:
    made(tmp_path, digits, "fafi", 1, seed=1)
    made(tmp_path, digits, "fafi", 1, seed=2, evaluation__batch_norm="batch")
    group = only(compare(find_runs([tmp_path])))
    assert [entry.method for entry in group.entries] == ["fafi"] and len(group.entries[0].runs) == 2


def test_settings_are_grouped_and_variants_named(digits: Dataset, tmp_path: Path) -> None:
    for alpha in (0.3, 5.0):
        for value in (1.0, 5.0):
            made(tmp_path, digits, "v7", 1, partition__alpha=alpha, alignment__weight__value=value)
    groups = compare(find_runs([tmp_path]))
    assert sorted(group.setting for group in groups) == ["alpha=0.3", "alpha=5.0"]
    assert [[entry.method for entry in group.entries] for group in groups] == [["etf value=1.0", "etf value=5.0"]] * 2


def test_runs_that_train_or_score_otherwise_are_no_repeats(digits: Dataset, tmp_path: Path) -> None:
    made(tmp_path, digits, "fafi", 1, training__epochs=1)
    made(tmp_path, digits, "fafi", 1, training__epochs=1, safeguards__largest_weight=7.0)
    made(tmp_path, digits, "fafi", 1, training__epochs=1, evaluation__unnormalised=True)
    group = only(compare(find_runs([tmp_path])))
    assert len(group.entries) == 3 and group.repeats == 1


def test_what_was_changed_for_one_method_only_is_reported(grid: Path) -> None:
    def differences(**changes: Any) -> list[str]:
        runs = find_runs([grid])
        changed = [replace(run, keys={**run.keys, **(changes if run.method == "fafi" else {})}) for run in runs]
        return [remark for remark in only(compare(changed)).remarks if "differ" in remark]

    assert differences() == []
    assert differences(**{"training.learning_rate": 0.001}) == [
        "methods differ in training.learning_rate: fafi 0.001, etf-entropy 0.05"
    ]
    assert differences(**{"training.augment.flip": 0.5}) == [
        "methods differ in training.augment.flip: fafi 0.5, etf-entropy 0.0"
    ]
    assert differences(**{"trace.every": 7, "alignment": "none"}) == []


def test_a_commit_that_is_not_known_is_left_out(grid: Path) -> None:
    runs = find_runs([grid])
    assert [line for line in only(compare(runs)).remarks if ", commit under test" in line]
    unknown = [replace(one, environment={**one.environment, "commit": None}) for one in runs]
    (line,) = (line for line in only(compare(unknown)).remarks if line.startswith("measured on"))
    assert "commit" not in line and "None" not in line and "torch" in line


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


def test_words_that_mean_nothing_are_refused(grid: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--baseline fafy: not among what is compared; did you mean 'fafi'"):
        compare(find_runs([grid]), baseline="fafy")
    with pytest.raises(RecipeError, match="no rule 'typical' in its runs"):
        compare(find_runs([grid]), rule="typical")
    with pytest.raises(RecipeError, match="no finished run"):
        find_runs([tmp_path])
    with pytest.raises(RecipeError, match="no such folder"):
        find_runs([tmp_path / "nowhere"])
