"""Runs are found in folders and in kept records, each once."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from grids import only
from oneround.analysis.comparison import compare
from oneround.analysis.tables import (
    gradients_sheet,
    lambda_sheets,
    methods_sheet,
    peaks_sheet,
    rounds_sheet,
)
from oneround.errors import RecipeError, RunError
from oneround.runs.archive import find_runs, keep


def test_a_run_given_twice_counts_once(grid: Path, tmp_path: Path) -> None:
    keep(find_runs([grid]), tmp_path / "kept.json")
    assert len(find_runs([tmp_path / "kept.json", grid])) == 6
    assert only(compare(find_runs([grid, tmp_path / "kept.json"]))).repeats == 2


def test_a_result_without_its_recipe_is_reported(grid: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(grid, tmp_path / "grid")
    next((tmp_path / "grid").rglob("recipe.yaml")).unlink()
    assert len(find_runs([tmp_path / "grid"])) == 5
    assert "result.json: left out, there is no recipe.yaml beside it" in caplog.text


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
    for text, fault in (
        ("[1]", "not a record"),
        ('{"format": "other"}', "its format is not 'oneround runs 1'"),
        ("{", r"\(no JSON\)"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(RecipeError, match=fault):
            find_runs([tmp_path / "bad.json"])


def test_what_is_kept_is_what_was_read(grid: Path, tmp_path: Path) -> None:
    runs = find_runs([grid])
    keep(runs, tmp_path / "kept.json")
    for run, kept in zip(runs, find_runs([tmp_path / "kept.json"]), strict=True):
        assert kept.path == tmp_path / "kept.json" and kept.finished
        for name in ("keys", "method", "partition_seed", "partition_digest", "accuracy", "local_accuracy", "curves"):
            assert getattr(kept, name) == getattr(run, name), name
        assert (kept.validation, kept.remarks, kept.measured_on) == (run.validation, run.remarks, run.measured_on)
        assert kept.personalised == run.personalised and run.personalised
        assert kept.measurements.elapsed.keys() == run.measurements.elapsed.keys()
        assert kept.trace("s").keys() == run.trace("s").keys() and kept.cosines().keys() == run.cosines().keys()
        with pytest.raises(RunError, match="needs the run folder"):
            _ = kept.recipe
    again = tmp_path / "again.json"
    keep(find_runs([tmp_path / "kept.json"]), again)
    assert again.read_bytes() == (tmp_path / "kept.json").read_bytes()


def test_a_kept_trace_has_five_digits_and_survives_infinity(grid: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    keep(find_runs([grid])[:1], file)
    content = json.loads(file.read_text())
    content["runs"][0]["traces"] = {
        "lambda_raw": {"a": {"2": "inf", "10": 0.123456789, "1": 1.0}},
        "seconds elapsed": {"run": {"1": 2}},
    }
    file.write_text(json.dumps(content))
    (kept,) = find_runs([file])
    assert [*kept.trace("lambda_raw")["a"].items()] == [(1, 1.0), (2, math.inf), (10, 0.123456789)], "by epoch"
    assert kept.measurements.elapsed == {1: 2.0}
    keep([kept], file)
    assert json.loads(file.read_text())["runs"][0]["traces"]["lambda_raw"]["a"] == {"1": 1.0, "2": "inf", "10": 0.12346}
