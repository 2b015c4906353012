"""The table of a named study: its figures follow from the runs, pairs are pairs, and verdicts on the note's figures need three of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from named_studies import study_file
from oneround.runs.log import Measurements
from oneround.runs.record import RunRecord
from oneround.studies.named_study import NamedStudy, cells, read_study
from oneround.studies.outcome import outcome
from oneround.studies.reproduce import Progress

SCORES = {"V4": (0.50, 0.52, 0.54, 0.56), "V7": (0.60, 0.62, 0.65, 0.67)}
"""IFFI in evaluation mode by partition; 10 points higher transductively, 30 points lower after epoch 1."""


def tiny(folder: Path, **changes: Any) -> NamedStudy:
    return read_study(str(study_file(folder, **{"partitions": "1-4", "settings": {"plain": {}}, **changes})))


def progress_of(study: NamedStudy, *, without: tuple[tuple[str, int], ...] = (), last: int = 3) -> Progress:
    """Every cell measured, save some variants on some partitions."""
    every, runs = cells(study), {}
    for cell in every:
        if (cell.variant, cell.partition) in without:
            continue
        at = cell.partition - 1 if study.training_seeds is None else cell.seed - 1
        end = SCORES[cell.variant][at]
        measured = Measurements(
            curves={"iffi": {1: end - 0.3, last: end}, "iffi, transductive": {1: end - 0.2, last: end + 0.1}},
            epochs={
                client: {1: {"anchor_cosine": 0.1}, last: {"anchor_cosine": value}}
                for client, value in (("client_000", 0.9), ("client_001", 0.7))
            },
        )
        rules = {name: {"accuracy": curve[last]} for name, curve in measured.curves.items()}
        result = {"rules": rules, "clients": {}, "partition": f"digest {cell.partition}"}
        runs[cell] = RunRecord(Path("x"), keys=cell.keys, measurements=measured, result=result, seconds=20.0 + at)
    return Progress(every, runs)


def table(study: NamedStudy, progress: Progress) -> list[dict[str, str]]:
    sheet = outcome(study, progress)
    return [dict(zip(sheet.heads, row, strict=True)) for row in sheet.rows]


def test_means_intervals_and_paired_differences(tmp_path: Path) -> None:
    study = tiny(tmp_path)
    first, first_7, v4, v7 = table(study, progress_of(study))
    assert [(row["epochs"], row["variant"], row["n"]) for row in (first, first_7, v4, v7)] == [
        ("1", "V4", "4"), ("1", "V7", "4"), ("3", "V4", "4"), ("3", "V7", "4"),
    ]  # fmt: skip
    assert v4["evaluation"] == "53.0 ± 4.1 (50.0 52.0 54.0 56.0)" and v7["transductive"].startswith("73.5 ± ")
    assert first["transductive"].startswith("33.0 ± ") and v4["− V4, evaluation"] == ""
    assert v7["− V4, evaluation"].startswith("+10.5 ± 0.9, p ")
    alone = ttest_rel(SCORES["V7"], SCORES["V4"]).pvalue
    assert v7["− V4, evaluation"].split()[-1] == f"{2 * alone:.2g}", "doubled by Holm for the two rows"
    assert v7["anchor_cosine"] == "0.8 ± 0" and first["anchor_cosine"] == "0.1 ± 0" and v4["s"] == "22"
    assert "setting" not in v4, "there is one"


def test_the_rule_that_counts_can_be_named(tmp_path: Path) -> None:
    study = tiny(tmp_path, rule="average")
    progress = progress_of(study)
    for run in progress.runs.values():
        run.measurements.curves["average"] = {3: 0.4}
    v4, v7 = table(study, progress)
    assert v4["evaluation"].startswith("40.0 ± 0.0 (") and v7["− V4, evaluation"].startswith("+0.0 ± 0.0")
    assert outcome(study, progress).notes[0].endswith("; rule: average")


def test_only_what_both_have_is_paired(tmp_path: Path) -> None:
    study = tiny(tmp_path)
    *_, v4, v7 = table(study, progress_of(study, without=(("V4", 1), ("V7", 4))))
    assert (v4["n"], v7["n"]) == ("3", "3") and v7["− V4, evaluation"].startswith("+10.5 ± "), "partitions 2 and 3"
    *_, v7 = table(study, progress_of(study, without=tuple(("V4", number) for number in range(1, 5))))
    assert v7["variant"] == "V7" and "− V4, evaluation" not in v7


@pytest.mark.parametrize(
    ("v4", "v7", "partitions", "accuracy", "difference"),
    [
        (62.9, 73.4, "1-4", "73.40, undecidable, n = 4", "+10.50, reproduced"),
        (62.9, 76.0, "1-4", "76.00, undecidable, n = 4", "+13.10, refuted"),
        (62.9, 95.0, "1-4", "95.00, refuted", "+32.10, refuted"),
        (62.9, 95.0, "1-2", "95.00, undecidable, n = 2", "+32.10, undecidable, n = 2"),
    ],
)
def test_a_figure_of_the_note_is_judged_by_its_distance_from_ours(
    v4: float, v7: float, partitions: str, accuracy: str, difference: str, tmp_path: Path
) -> None:
    """Our mean is 73.5 ± 4.9 transductively: too wide to reproduce a figure, narrow enough to refute one."""
    study = tiny(tmp_path, partitions=partitions, note={"plain": {"V4": v4, "V7": v7}})
    first, *_, row = table(study, progress_of(study))
    assert first["the note"] == "", "it is of the last epoch"
    assert row["the note"] == accuracy and row["the note − V4"] == difference


def test_a_note_by_epoch_and_quantities_of_clients(tmp_path: Path) -> None:
    figures = [{"setting": "plain", "variant": "V7", "quantity": "anchor_cosine", "epoch": 3, "values": [0.8, 0.7]}]
    study = tiny(tmp_path, note={"plain": {"V4": {1: 33.1}}}, figures=figures)
    first, *rest = table(study, progress_of(study))
    assert first["the note"].startswith("33.10, ") and not any(row["the note"] for row in rest)
    (line,) = (note for note in outcome(study, progress_of(study)).notes if note.startswith("anchor_cosine"))
    assert "0.9 0.7 (mean of 4 runs); the note 0.8 0.7; at most 12 % apart" in line


def test_training_seeds_are_the_units_where_there_is_one_partition(tmp_path: Path) -> None:
    study = tiny(tmp_path, partitions=[1], training_seeds="1-4")
    *_, v7 = table(study, progress_of(study))
    assert v7["n"] == "4" and v7["− V4, evaluation"].startswith("+10.5 ± 0.9, p ")
    assert "(each training seed)" in outcome(study, progress_of(study)).notes[0]
    several = tiny(tmp_path, partitions=[1, 2], training_seeds="1-4")
    *_, v7 = table(several, progress_of(several))
    assert v7["n"] == "2" and "(63.5 63.5)" in v7["evaluation"], "repeats on a partition are averaged first"
