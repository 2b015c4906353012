"""A named study is measured into one record: killed and gone on with, in parts, with nothing left behind, and each cell as its own run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from named_studies import content, study_file
from oneround.config.load import change
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.runs import pictures
from oneround.runs.archive import find_runs
from oneround.simulate import run
from oneround.studies.merge import merge_records
from oneround.studies.named_study import Cell, cells, read_study
from oneround.studies.outcome import rows_of
from oneround.studies.reproduce import Progress, _is_kept, read_progress, reproduce, trainings
from oneround.studies.sweep import part_of


def all_cells(folder: Path, **changes: Any) -> list[Cell]:
    return cells(read_study(str(study_file(folder, **changes))))


def measured(folder: Path, every: list[Cell], **options: Any) -> Progress:
    return reproduce(every, folder / "record.json", folder / "runs", **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that nothing disturbed; pictures of runs that are not kept would be drawn for nobody."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "_figure", None)
        progress = measured(folder, all_cells(folder))
    assert len(progress.runs) == 7 and not progress.left and not progress.failed
    return folder


def test_only_the_record_is_left(whole: Path) -> None:
    assert not list((whole / "runs").iterdir())
    assert (whole / "record.json").stat().st_size < 8_000 * 7


def test_each_cell_says_what_a_run_of_its_recipe_says(whole: Path, digits: Dataset, tmp_path: Path) -> None:
    """Those that share uploads and those with wrong labels among them."""
    progress = measured(whole, all_cells(tmp_path))
    for number, cell in enumerate(progress.cells):
        alone = run(cell.recipe, tmp_path / str(number), data=digits)
        found = progress.runs[cell]
        assert found.accuracy == alone.rules and found.local_accuracy == alone.clients, cell.name
        assert found.partition_digest == alone.partition and found.keys["seeds.partition"] == cell.partition
        last = {rule: {3: curve[3]} for rule, curve in alone.curves.items()}
        assert found.curves == (last if cell.setting == "unnormalised" else alone.curves)
        assert found.seconds and found.measured_on["device"]


def test_what_is_in_the_record_is_not_measured_again(whole: Path, tmp_path: Path) -> None:
    left_over = whole / "runs" / all_cells(tmp_path)[0].recipe.digest[:16] / "uploads"
    left_over.mkdir(parents=True)
    before, events = (whole / "record.json").read_bytes(), list[dict[str, Any]]()
    measured(whole, all_cells(tmp_path), emit=events.append)
    assert events == [{"event": "sweep", "cells": 7, "done": 7}] and (whole / "record.json").read_bytes() == before
    assert not left_over.parent.exists(), "killed when the record was written and the folder not yet removed"


def test_killed_at_a_random_moment_it_goes_on_and_ends_with_the_same_record(whole: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "oneround.cli", "reproduce", str(study_file(tmp_path))]
    words += ["--out", str(tmp_path / "record.json"), "--runs", str(tmp_path / "runs")]
    when = random.Random().uniform(0.0, 4.0)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    limit = time.monotonic() + 120
    while not list(tmp_path.rglob("broadcast.safetensors")) and time.monotonic() < limit:
        time.sleep(0.02)
    time.sleep(when)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "record.json") == content(whole / "record.json"), f"killed {when:.2f} s after it began"
    assert not list((tmp_path / "runs").iterdir())


def test_the_time_budget_ends_between_epochs_and_the_rest_follows(whole: Path, tmp_path: Path) -> None:
    first = measured(tmp_path, all_cells(tmp_path), minutes=0.0001)
    assert not first.runs and len(first.left) == 7 and not (tmp_path / "record.json").exists()
    (state,) = tmp_path.rglob("state.safetensors")
    assert state.stat().st_size > 0, "the epoch it was in is saved"
    for _ in range(100):
        if not measured(tmp_path, all_cells(tmp_path), minutes=0.005).left:
            break
    assert content(tmp_path / "record.json") == content(whole / "record.json")
    with pytest.raises(RecipeError, match="--minutes nan: must be"):
        measured(tmp_path, all_cells(tmp_path), minutes=float("nan"))


def test_parts_that_were_merged_are_the_whole_record(whole: Path, tmp_path: Path) -> None:
    together = trainings(all_cells(tmp_path))
    assert sorted(map(len, together)) == [1, 1, 1, 2, 2], "cells that differ in scoring share their uploads"
    parts = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        measured(folder, [cell for each in part_of(together, f"{number}/2") for cell in each])
        parts.append(folder / "record.json")
    merged = merge_records(parts, tmp_path / "both.json")
    assert merged.runs == 7 and not merged.faults
    assert content(tmp_path / "both.json") == content(whole / "record.json")


def test_runs_of_another_record_are_taken_over_where_they_are_cells(whole: Path, tmp_path: Path) -> None:
    more = all_cells(tmp_path, settings={"plain": {}}, partitions="2-3")
    events: list[dict[str, Any]] = []
    progress = measured(tmp_path, more, known=[whole / "record.json"], emit=events.append)
    assert events[0] == {"event": "sweep", "cells": 4, "done": 2} and not progress.left
    assert [run.partition_seed for run in find_runs([tmp_path / "record.json"])] == [2, 2, 3, 3]


def test_other_runs_stay_in_the_record(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes((whole / "record.json").read_bytes())
    measured(tmp_path, all_cells(tmp_path, partitions=[3], settings={"plain": {}}))
    assert len(find_runs([tmp_path / "record.json"])) == 9


def test_a_cell_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    diverging = {"method": "fafi", "set": {"training.learning_rate": 1e30, "training.clip_norm": 0.0}}
    variants = {"V4": diverging, "V7": "etf"}
    every = all_cells(tmp_path, variants=variants, settings={"plain": {}}, partitions=[1])
    events: list[dict[str, Any]] = []
    progress = measured(tmp_path, every, emit=events.append)
    assert [cell.variant for cell in progress.runs] == ["V7"] and not progress.left
    assert ["not finite" in text for text in progress.failed.values()] == [True]
    assert [event["state"] for event in events if event["event"] == "cell"] == ["failed", "done"]


def test_variants_that_differ_in_the_rule_share_a_run(whole: Path, tmp_path: Path) -> None:
    variants = {"V4": "fafi", "average": {"method": "fafi", "rule": "average"}}
    study = read_study(str(study_file(tmp_path, variants=variants, settings={"plain": {}}, note={})))
    every, events = cells(study), list[dict[str, Any]]()
    progress = measured(tmp_path, every, emit=events.append)
    runs = find_runs([tmp_path / "record.json"])
    assert len(every) == 4 and len(runs) == 2 and not progress.left
    rows, again = (rows_of(study, each) for each in (progress, read_progress(every, tmp_path / "record.json")))
    for mode, suffix in (("evaluation", ""), ("transductive", ", transductive")):
        for variant, rule in (("V4", "iffi"), ("average", "average")):
            expected = [100 * run.accuracy[rule + suffix] for run in runs]
            for row in (rows["plain", 3, variant], again["plain", 3, variant]):
                assert list(row.accuracies[mode].values()) == pytest.approx(expected)
    assert rows["plain", 3, "average"].accuracies != rows["plain", 3, "V4"].accuracies
    shown = [event["accuracy"] for event in events if event["event"] == "cell"]
    assert [next(iter(each)) for each in shown] == ["iffi", "average"] * 2


def test_a_cell_that_begins_at_features_trains_a_run_before_it(tmp_path: Path, digits: Dataset) -> None:
    own = {"method": "fafi-from-features"}
    variants = {
        "V4": "fafi",
        "later": {"method": "fafi", "set": own, "first": {"method": "fafi", "set": {"fusion": ["feature-vote"]}}},
    }
    every = all_cells(tmp_path, variants=variants, settings={"plain": {}}, partitions=[1], note={})
    progress = measured(tmp_path, every)
    assert not list((tmp_path / "runs").iterdir())
    (plain, later), cell = progress.runs.values(), every[1]
    assert cell.first is not None and cell.first.seeds.training == 101 and cell.recipe.seeds.training == 1
    run(cell.first, tmp_path / "first", data=digits)
    by_hand = run(change(cell.recipe, {"local.initial_features": tmp_path / "first"}), tmp_path / "later", data=digits)
    assert later.accuracy == by_hand.rules != plain.accuracy and later.method == "fafi-from-features"
    (tmp_path / "again").mkdir()
    stops = 0
    while (again := measured(tmp_path / "again", every[1:], minutes=0.0001)).left and stops < 100:
        stops += 1
    assert stops > 3 and again.runs[cell].accuracy == later.accuracy, "the run before it is stopped and goes on as well"
    assert not list((tmp_path / "again/runs").iterdir())


def test_traces_of_the_first_epochs_and_every_fifth_and_of_snapshots_are_kept() -> None:
    kept = [epoch for epoch in range(1, 51) if _is_kept(epoch, [15, 20, 50])]
    assert kept == [*range(1, 12), 15, 16, 20, 21, 26, 31, 36, 41, 46, 50]
