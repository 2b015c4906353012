"""Rules about clients that did not learn, or lost what they had learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diagnosis.doctored import ALIGNED, PLAIN, Ran, history, recipe_of, record_of, seen
from oneround.analysis.diagnosis import Finding, findings
from oneround.analysis.diagnosis.diagnose import diagnose
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.simulate import run as simulate


def test_a_client_that_never_learned_is_reported_by_its_loss_and_by_its_accuracy(still: Ran) -> None:
    losses = still.series("cross-entropy")
    by_loss = {each.client: each for each in still.of("never-learned") if each.about == "loss"}
    assert by_loss.keys() == losses.keys()
    for client, finding in by_loss.items():
        assert client is not None and finding.epoch == 2
        assert finding.value == pytest.approx(1 - losses[client][2] / losses[client][1]) and finding.value < 0.05
    counts, scores = still.json("partition.json")["class_counts"], still.json("result.json")["clients"]
    wanted = set()
    for number, (client, score) in enumerate(sorted(scores.items())):
        tested = [sum(row) for row in score["confusion"]]
        most = counts[number].index(max(counts[number]))
        mixed = sum(count >= 0.05 * sum(counts[number]) for count in counts[number]) > 1
        wanted |= {client} if mixed and score["accuracy"] <= tested[most] / sum(tested) else set()
    assert wanted and {each.client for each in still.of("never-learned") if each.about == "accuracy"} == wanted


def test_a_client_that_its_rails_stopped_is_reported_from_the_uploads_alone(folder: Path, digits: Dataset) -> None:
    run_dir = folder / "stopped"
    stop = recipe_of(
        "etf-decoupled",
        6,
        alignment__weight__rate=2.0,
        safeguards__largest_weight=9.0,
        safeguards__on_explosion="stop",
        partition__clients=2,
    )
    with pytest.raises(RunError):
        simulate(stop, run_dir, data=digits)
    assert not (run_dir / "metrics.jsonl").exists() and not (run_dir / "result.json").exists()
    diagnosis = diagnose(run_dir)
    halted = {each.client: each for each in diagnosis.findings if each.rule == "diverged"}
    assert halted and diagnosis.run.stopped.keys() == halted.keys()
    for client, finding in halted.items():
        assert (
            finding.severity == "problem" and finding.epoch == len(diagnosis.run.measurements.epochs[client or ""]) < 6
        )
        assert "out of range" in finding.evidence
    passed = {each.client: each.threshold for each in diagnosis.findings if each.rule == "exploding-lambda"}
    assert passed == dict.fromkeys(halted, 9.0)
    assert "fusion-worse-than-best-client" in diagnosis.skipped


def test_who_learned_and_who_did_not() -> None:
    """Doctored: losses, accuracies."""

    def at(first: float, last: float, n: int = 20, **more: Any) -> list[int | None]:
        run = history(PLAIN, n, cross__entropy=[first, *[last] * (n - 1)], base=1.0, **more)
        return [epoch for epoch, _ in seen(run, "never-learned")]

    assert at(2.0, 1.91) == [20] and at(2.0, 1.89) == [] and at(2.0, 9.0) == [20]
    assert at(0.01, 0.01) == [], "it knew all in the first epoch"
    assert at(2.0, 2.0, 9) == [] and at(2.0, 2.0, 10) == [10], "a slow start"
    lost = history(PLAIN, 20, base=[3.0, 1.0, *[3.0] * 18])
    (finding,) = findings(lost)
    assert "1 at its lowest (epoch 2)" in finding.evidence and "rose again" in finding.advice

    def alone(accuracy: float, counts: list[int]) -> list[Finding]:
        entries = {"a": [{"epoch": 1, "base": 1.0}]}
        return findings(record_of(PLAIN, entries, {"a": counts}, [30, 70], local_accuracy={"a": {1: accuracy}}))

    assert [each.threshold for each in alone(0.3, [60, 40])] == [0.3] and alone(0.31, [60, 40]) == []
    assert [each.threshold for each in alone(0.7, [40, 60])] == [0.7], "of its most frequent class"
    assert alone(0.1, [97, 3]) == [], "a client of one class cannot do better"


def test_what_the_rails_did_is_reported() -> None:
    """Doctored: an alignment that was dropped, and a mark no other rule tells."""
    clamp = recipe_of("etf-decoupled", 20, safeguards__on_explosion="clamp")
    dropped = {"lambda_raw": 5.0, "s": 1.0, "lambda_effective": [5.0] * 4 + [0.0] * 16}
    assert (
        seen(history(clamp, **dropped), "diverged") == [(5, 0.0)]
        and seen(history(ALIGNED, **dropped), "diverged") == []
    )
    assert seen(history(clamp, **{**dropped, "s": [1.0] * 4 + [0.0] * 16}), "diverged") == []
    marked = record_of(
        PLAIN, {"a": [{"epoch": 1}, {"epoch": 2, "trouble": ["not-finite"]}, {"epoch": 3, "trouble": ["weight"]}]}
    )
    assert seen(marked, "diverged") == [(2, 1.0)]
