"""A folder is diagnosed whatever is in it, and a run while it trains."""

from __future__ import annotations

import cProfile
import json
from pathlib import Path
from typing import Any

import pytest

from diagnosis.doctored import OVER_LAMBDA, Ran, recipe_of
from oneround.analysis.diagnosis import RULES, Finding
from oneround.analysis.diagnosis.diagnose import LiveDiagnosis, diagnose
from oneround.data import Dataset
from oneround.errors import ProtocolError
from oneround.runs.log import MetricsLog
from oneround.runs.record import RunRecord
from oneround.simulate import run as simulate


def test_nothing_is_found_in_a_healthy_run(healthy: Ran) -> None:
    assert healthy.diagnosis.findings == () and healthy.reported == []
    assert set(healthy.diagnosis.applied) == {rule.name for rule in RULES} - OVER_LAMBDA
    assert set(healthy.diagnosis.skipped) == OVER_LAMBDA and all(healthy.diagnosis.skipped.values())
    assert diagnose(healthy.folder, deep=True).findings == ()


def test_a_run_under_way_is_read_from_states_and_uploads(folder: Path, digits: Dataset) -> None:
    class Stop(Exception):
        pass

    seen: list[dict[str, Any]] = []

    def stop(event: dict[str, Any]) -> None:
        seen.extend([event] if event["event"] == "epoch" else [])
        if len(seen) == 5:  # all three epochs of one client, the second of the other
            raise Stop

    run_dir = folder / "under way"
    slow = recipe_of("fafi", 3, partition__clients=2, training__learning_rate=1e-7, local__checkpoint_seconds=0.0)
    with pytest.raises(Stop):
        simulate(slow, run_dir, data=digits, emit=stop)
    diagnosis = diagnose(run_dir)
    done, begun = seen[0]["client"], seen[4]["client"]
    assert {client: len(entries) for client, entries in diagnosis.run.measurements.epochs.items()} == {
        done: 3,
        begun: 1,
    }
    assert {each.client for each in diagnosis.findings if each.rule == "never-learned"} == {done}
    assert diagnosis.skipped["fusion-worse-than-best-client"] == "not scored at the end of training"


def test_a_client_without_samples_is_none(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_of("fafi", 1).to_yaml())
    partition = {"digest": "d", "class_counts": [[3, 0], [0, 0], [1, 2]], "shared_samples": 0}
    (tmp_path / "partition.json").write_text(json.dumps(partition))
    assert set(diagnose(tmp_path).run.counts) == {"client_000", "client_002"}


@pytest.mark.parametrize("name", ["exploded", "steady", "still", "collapsed"])
def test_what_is_reported_live_is_what_is_found_afterwards(name: str, request: pytest.FixtureRequest) -> None:
    ran: Ran = request.getfixturevalue(name)
    reported = [each.key for each in ran.reported]
    assert len(set(reported)) == len(reported), "once each"
    afterwards = {each.key for each in ran.diagnosis.findings if each.about != "accuracy"}  # it needs the result
    upgraded = {key for key in reported if key[3] == "warning" and (*key[:3], "problem") in reported}
    passing = {
        key
        for key in set(reported) - afterwards - upgraded
        if key[0] in ("fusion-worse-than-best-client", "past-its-peak")
    }
    assert set(reported) - upgraded - passing == afterwards and afterwards
    first = next(each for each in ran.reported if each.key in afterwards)
    assert any(each.epoch == first.epoch for each in ran.diagnosis.findings if each.key == first.key)


def test_a_resumed_run_is_not_reported_again_what_it_had_found(exploded: Ran) -> None:
    """Doctored: the events of the last epochs once more, on a real folder."""
    reported: list[Finding] = []
    passed: list[dict[str, Any]] = []
    watch = LiveDiagnosis(exploded.folder, reported.append, passed.append)
    events = [{"event": "plan", "lines": [], "steps": 1, "epochs": 10}]
    events += [
        event
        for event in MetricsLog(exploded.folder / "metrics.jsonl")
        if event["event"] == "epoch" and event["epoch"] > 7
    ]
    for event in events:
        watch(event)
    assert reported == [] and passed == events


def test_an_epoch_trained_again_after_a_kill_counts_once(exploded: Ran) -> None:
    """Doctored: collapsed features, the second epoch three times."""
    reported: list[Finding] = []
    watch = LiveDiagnosis(exploded.folder, reported.append)
    for epoch in (1, 2, 2, 2):
        watch({"event": "epoch", "client": "x", "epoch": epoch, "spread": 0.001})
    assert "feature-collapse" not in {each.rule for each in reported}
    watch({"event": "epoch", "client": "x", "epoch": 3, "spread": 0.001})
    assert [(each.client, each.epoch) for each in reported if each.rule == "feature-collapse"] == [("x", 3)]


def test_what_a_client_measured_before_it_was_trained_again_does_not_count(exploded: Ran) -> None:
    """Doctored: three epochs, then from the first on again."""
    watch = LiveDiagnosis(exploded.folder, lambda finding: None)
    for epoch in (1, 2, 3, 1):
        watch({"event": "epoch", "client": "x", "epoch": epoch, "spread": 0.5})
    assert watch.record is not None
    assert list(watch.record.measurements.epochs["x"]) == [1]


def test_diagnosis_that_fails_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    passed: list[dict[str, Any]] = []
    watch = LiveDiagnosis(tmp_path / "nothing here", lambda finding: None, passed.append)
    for epoch in (1, 2):
        watch({"event": "epoch", "client": "a", "epoch": epoch})
    assert len(passed) == 2 and caplog.text.count("diagnosis while training ended") == 1


@pytest.mark.slow
def test_live_is_cheap(exploded: Ran) -> None:
    """Doctored epochs of healthy clients: each costs a look at its own client's history and at nobody else's."""
    watch = LiveDiagnosis(exploded.folder, lambda finding: None)
    entry = next(e for e in MetricsLog(exploded.folder / "metrics.jsonl") if e["event"] == "epoch" and "gradients" in e)

    def calls(client: str, first: int) -> int:
        with cProfile.Profile() as profile:
            for epoch in range(first, first + 30):
                watch({**entry, "client": client, "epoch": epoch, "lambda_raw": 1.0, "lambda_effective": 1.0})
        return sum(each.callcount for each in profile.getstats())

    calls("reader", 1)  # which reads the folder
    first, second, third, other = calls("x", 1), calls("x", 31), calls("x", 61), calls("y", 1)
    assert first < second < third < second + 1.2 * (second - first)
    assert other < 1.1 * first


def test_only_a_folder_without_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="not a run folder"):
        diagnose(tmp_path)


def test_what_is_damaged_is_left_out_and_named(tmp_path: Path, exploded: Ran) -> None:
    (tmp_path / "recipe.yaml").write_bytes((exploded.folder / "recipe.yaml").read_bytes())
    bare = diagnose(tmp_path)
    assert bare.findings == () and bare.applied == () and bare.remarks == ()
    for name in ("partition.json", "result.json", "broadcast.safetensors", "uploads/client_000.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{torn")
    doctored = [{"event": "epoch", "client": "a", "epoch": 1, "lambda_raw": "much", "gradients": {"features": 3}, "base": 1.0},
                {"event": "epoch", "epoch": "one"}, {"event": "client", "client": "a", "epoch": 1}, {"event": "snapshot"}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in doctored) + '{"torn')
    diagnosis = diagnose(tmp_path, deep=True)
    assert diagnosis.findings == () and diagnosis.run.measurements.epochs == {"a": {1: {"epoch": 1, "base": 1.0}}}
    for part in (
        "partition.json",
        "result.json",
        "broadcast.safetensors",
        "client_000.safetensors",
        "deep check is left out",
    ):
        assert any(part in remark for remark in diagnosis.remarks), part


def scored(epoch: int, rule: str, accuracy: float) -> dict[str, object]:
    return {"event": "snapshot", "epoch": epoch, "rule": rule, "accuracy": accuracy}


def test_live_needs_events_only(tmp_path: Path) -> None:
    """Doctored: a snapshot as it is emitted; the log is never there."""
    (tmp_path / "recipe.yaml").write_text(recipe_of("fafi", 2).to_yaml())
    reported: list[Finding] = []
    watch = LiveDiagnosis(tmp_path, reported.append)
    watch({"event": "plan", "lines": []})
    watch({"event": "epoch", "client": "a", "epoch": 1, "base": 2.0})
    watch({"event": "snapshot", "epoch": 1, "logged": [scored(1, "iffi", 0.9)]})
    assert reported == []
    watch({"event": "epoch", "client": "a", "epoch": 2, "base": 1.0})
    alone = {"event": "client", "epoch": 2, "client": "a", "accuracy": 0.7}
    watch({"event": "snapshot", "epoch": 2, "logged": [scored(2, "iffi", 0.5), alone]})
    assert {each.rule: each.value for each in reported} == {
        "past-its-peak": pytest.approx(40),
        "fusion-worse-than-best-client": 0.5,
    }
    watch({"event": "snapshot", "epoch": 2, "logged": [scored(2, "iffi", 0.5), alone]})
    assert len(reported) == 2, "once each"


def test_a_record_is_diagnosed_like_its_folder(exploded: Ran) -> None:
    assert diagnose(RunRecord.read(exploded.folder)).plain() == diagnose(str(exploded.folder)).plain()
