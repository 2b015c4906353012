"""Rules about who holds what, and what the fused model makes of it."""

from __future__ import annotations

import pytest

from diagnosis.doctored import Ran, recipe_of, record_of
from oneround.analysis.diagnosis import findings
from oneround.config.load import load
from oneround.runs.log import MetricsLog


def test_shared_data_is_reported(still: Ran) -> None:
    (finding,) = still.of("shared-data")
    assert finding.value == still.json("partition.json")["shared_samples"] > 0 and finding.client is None


def test_classes_that_nobody_holds_and_pairs_that_plain_averaging_takes_in(collapsed: Ran, healthy: Ran) -> None:
    counts = collapsed.json("partition.json")["class_counts"]
    orphan, pairs = sorted(collapsed.of("prototype-never-trained"), key=lambda each: each.about)
    assert orphan.severity == "problem" and orphan.value == 1 and orphan.evidence.endswith(": 9")
    assert pairs.severity == "note" and pairs.value == sum(count == 0 for row in counts for count in row[:9]) > 0
    assert "prototype-never-trained" in healthy.diagnosis.applied


def test_pairs_are_no_matter_to_a_rule_that_asks_who_knows_a_class() -> None:
    """Doctored: two clients with one class each."""
    for fusion, wanted in (("iffi", 1), ("average", 1), ("typicality-gated", 0)):
        run = record_of(recipe_of("fafi", 2, fusion=[fusion]), counts={"a": [5, 0], "b": [0, 5]})
        assert len(findings(run)) == wanted


def test_accuracy_past_its_peak_and_below_a_single_client(exploded: Ran) -> None:
    snapshots = {
        e["epoch"]: e["accuracy"] for e in MetricsLog(exploded.folder / "metrics.jsonl") if e["event"] == "snapshot"
    }
    best = max(snapshots, key=lambda epoch: snapshots[epoch])
    (finding,) = exploded.of("past-its-peak")
    assert finding.epoch == 10 and finding.value == pytest.approx(100 * (snapshots[best] - snapshots[10]), abs=1e-4)
    assert f"at epoch {best} " in finding.evidence and "seen on test data" in finding.evidence
    result = exploded.json("result.json")
    alone = max(score["accuracy"] for score in result["clients"].values())
    worse = result["rules"]["iffi"]["accuracy"] < alone
    assert [each.threshold for each in exploded.of("fusion-worse-than-best-client")] == [alone] * worse


def test_three_points_are_past_the_peak_and_fusion_must_beat_the_best_client() -> None:
    """Doctored: accuracies."""

    def at(curve: dict[int, float], alone: dict[str, dict[int, float]] | None = None) -> dict[str, float]:
        nine = recipe_of("fafi", 9)
        curves = {"iffi": curve, "average": {9: 0.9}}
        run = record_of(nine, {"a": [{"epoch": 1}]}, curves=curves, local_accuracy=alone or {})
        return {each.rule: each.value for each in findings(run)}

    assert at({3: 0.6, 6: 0.58, 9: 0.571}) == {} and at({3: 0.6, 6: 0.58, 9: 0.57}) == {"past-its-peak": 3.0}
    assert at({3: 0.6, 9: 0.6}, {"a": {9: 0.6}, "b": {3: 0.9, 9: 0.5}}) == {}
    assert at({3: 0.6, 9: 0.6}, {"a": {9: 0.61}, "b": {3: 0.9}}) == {"fusion-worse-than-best-client": 0.6}
    assert at({3: 0.6}, {"a": {3: 0.61}}) == {}, "early, networks fuse badly"


def test_the_peak_is_sought_on_validation_data_where_there_is_some() -> None:
    """What the test data says of the best snapshot is not looked at then."""
    falling, rising = {3: 0.9, 6: 0.5, 9: 0.4}, {3: 0.3, 6: 0.8, 9: 0.9}
    run = record_of(load("fafi", [("training.epochs", 9)]), curves={"iffi": falling}, validation={"iffi": rising})
    assert findings(run) == []
    (found,) = findings(record_of(run.recipe, curves={"iffi": rising}, validation={"iffi": {3: 0.7, 6: 0.8, 9: 0.6}}))
    assert found.rule == "past-its-peak" and found.value == pytest.approx(20)
    assert "at epoch 6 " in found.evidence and "on validation data" in found.evidence and "--epochs 6" in found.advice


def test_of_equal_peaks_the_earliest_is_reported() -> None:
    recipe = load("fafi", [("training.epochs", 9)])
    (found,) = findings(record_of(recipe, curves={"iffi": {3: 0.6, 6: 0.6, 9: 0.5}}))
    assert "had 60.0 % at epoch 3 " in found.evidence and "about 3 epochs" in found.advice


def test_no_transductive_score_is_advised() -> None:
    """It is no rule that could be put first."""
    curves = {"iffi": {9: 0.5}, "iffi, transductive": {9: 0.9}, "average": {9: 0.6}}
    run = record_of(recipe_of("fafi", 9), {"a": [{"epoch": 1}]}, curves=curves, local_accuracy={"a": {9: 0.55}})
    (finding,) = findings(run)
    assert finding.advice.startswith("average has 60.0 %")
