"""Every rule finds what it is for in a run that has it, and nothing in one that has not."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from oneround.cli import app
from oneround.data import Dataset
from oneround.diagnose import diagnose, live
from oneround.errors import ProtocolError, RunError
from oneround.learning import Batch
from oneround.learning.alignment import instability_threshold
from oneround.learning.objective import Term, terms
from oneround.observe.diagnosis import RULES, Finding, Run, findings
from oneround.observe.diagnosis.geometry import effective_rank, geometry_of
from oneround.observe.log import MetricsLog
from oneround.reading import load
from oneround.recipe import Recipe
from oneround.simulate import run as simulate

SMALL = {"model.encoder": {"kind": "cnn", "width": 4}, "training.batch_size": 32, "fusion": ["iffi"], "partition.clients": 3, "partition.alpha": 0.5,
         "local.workers": 1, "snapshots": 0, "trace.every": 1}  # fmt: skip
OVER_LAMBDA = {"exploding-lambda", "over-alignment", "unstable-sigma"}


def recipe_of(preset: str, epochs: int, **changes: Any) -> Recipe:
    given = {**SMALL, "training.epochs": epochs, **{key.replace("__", "."): value for key, value in changes.items()}}
    return load(preset, given.items())


class Ran:
    """A run, what was told while it trained, and what is found in its folder."""

    def __init__(self, folder: Path, data: Dataset, recipe: Recipe) -> None:
        self.folder, self.told = folder, list[Finding]()
        simulate(recipe, folder, data=data, emit=live(folder, self.told.append))
        self.diagnosis = diagnose(folder)

    def of(self, rule: str) -> list[Finding]:
        return [finding for finding in self.diagnosis.findings if finding.rule == rule]

    @property
    def rules(self) -> set[str]:
        return {finding.rule for finding in self.diagnosis.findings}

    def series(self, key: str) -> dict[str, dict[int, float]]:
        """Straight from metrics.jsonl."""
        found: dict[str, dict[int, float]] = {}
        for event in MetricsLog(self.folder / "metrics.jsonl"):
            if event["event"] == "epoch" and key in event:
                found.setdefault(event["client"], {})[event["epoch"]] = event[key]
        return found

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def healthy(folder: Path, digits: Dataset) -> Ran:
    """Two clients with all classes alike: they learn, and fused they are better than each."""
    return Ran(folder / "healthy", digits, recipe_of("fafi", 4, partition={"kind": "iid", "clients": 2}, snapshots=2))


@pytest.fixture(scope="module")
def steady(folder: Path, digits: Dataset) -> Ran:
    """A learned λ that stays where it should."""
    return Ran(folder / "steady", digits, recipe_of("etf-decoupled", 6))


@pytest.fixture(scope="module")
def exploded(folder: Path, digits: Dataset) -> Ran:
    """V12 with σ that learn two hundred times too fast."""
    return Ran(folder / "exploded", digits, recipe_of("v12", 10, alignment__weight__rate=20.0, snapshots=2))


@pytest.fixture(scope="module")
def still(folder: Path, digits: Dataset) -> Ran:
    """Steps too small to learn anything; clients share data."""
    still = recipe_of("fafi", 2, training__learning_rate=1e-7, partition={"kind": "dirichlet-overlap", "clients": 2})
    return Ran(folder / "still", digits, still)


class Attraction(Term):
    """Pulls all features together, whatever their class."""

    def loss(self, batch: Batch) -> Tensor:
        return -20 * batch.unit.mean(0).square().sum() + 0 * batch.prototypes.sum()


@pytest.fixture(scope="module")
def collapsed(folder: Path, digits: Dataset) -> Iterator[Ran]:
    """A term that only attracts; the training images have no sample of the last class."""
    terms.register("test-attraction")(Attraction)
    fewer = digits.train.take(torch.nonzero(digits.train.labels < 9)[:, 0])
    data = Dataset("no nines", fewer, digits.test, digits.class_names, mirror=False)
    four = ("cross-entropy", "supervised-contrastive", "prototype-feature", "prototype-separation")
    weights = {"test-attraction": {}, **{name: {"weight": 0.0} for name in four}}
    yield Ran(folder / "collapsed", data, recipe_of("fafi", 4, objective={"terms": weights}, partition__clients=2))
    terms.kinds.pop("test-attraction")


# --- the healthy -----------------------------------------------------------------------------------------------------


def test_nothing_is_found_in_a_healthy_run(healthy: Ran) -> None:
    assert healthy.diagnosis.findings == () and healthy.told == []
    assert set(healthy.diagnosis.looked) == {rule.name for rule in RULES} - OVER_LAMBDA
    assert set(healthy.diagnosis.aside) == OVER_LAMBDA and all(healthy.diagnosis.aside.values())
    assert diagnose(healthy.folder, deep=True).findings == ()


def test_a_learned_weight_that_stays_in_range_is_no_finding(steady: Ran) -> None:
    assert not OVER_LAMBDA & steady.rules and set(steady.diagnosis.looked) >= OVER_LAMBDA


# --- λ ---------------------------------------------------------------------------------------------------------------


def test_an_exploding_weight_is_told_with_client_epoch_and_threshold(exploded: Ran) -> None:
    raw, effective = exploded.series("lambda_raw"), exploded.series("lambda_applied")
    wanted = {}
    for client, values in raw.items():
        limit = min(1000.0, max(50.0, 100 * min(values[epoch] for epoch in (1, 2, 3))))
        epochs = [epoch for epoch in sorted(values) if values[epoch] >= limit or effective[client][epoch] >= limit]
        if epochs:
            severity = "problem" if max(effective[client].values()) >= limit else "warning"
            wanted[client] = (epochs[0], raw[client][epochs[0]], limit, severity)
    found = exploded.of("exploding-lambda")
    assert wanted and len(wanted) == len(found)
    for each in found:
        assert each.client is not None
        assert (each.epoch, each.value, each.threshold, each.severity) == wanted[each.client]
    recipe, features = exploded.diagnosis.run.recipe, exploded.diagnosis.run.features
    assert features == 16
    threshold = instability_threshold(recipe, 10, 16)
    assert threshold == pytest.approx(1.9 * 10 * 16 / 0.05)
    for each in found:
        assert each.client is not None and f"= {threshold:.4g}" in each.evidence and "guard" in each.advice
        past = [epoch for epoch, value in sorted(effective[each.client].items()) if value > threshold]
        assert each.evidence.endswith(f"passed in epoch {past[0]}" if past else f"{threshold:.4g}")


def test_alignment_that_outweighs_the_base_loss_is_told(exploded: Ran) -> None:
    base, align, weight = (exploded.series(key) for key in ("base", "align", "lambda_applied"))
    wanted = {}
    for client in base:
        over = [weight[client][epoch] * align[client][epoch] > base[client][epoch] for epoch in range(1, 11)]
        ends = [epoch for epoch in range(3, 11) if all(over[epoch - 3 : epoch])]
        wanted |= {client: ends[0]} if ends else {}
    assert wanted and {each.client: each.epoch for each in exploded.of("over-alignment")} == wanted
    assert all(each.value > each.threshold == 1 for each in exploded.of("over-alignment"))


def test_sigma_that_swings_is_told(exploded: Ran) -> None:
    found = exploded.of("unstable-sigma")
    assert found and all(each.client in exploded.series("lambda_raw") for each in found)
    for each in found:
        assert each.client is not None
        raw = [value for epoch, value in sorted(exploded.series("lambda_raw")[each.client].items()) if epoch > 2]
        assert max(max(a / b, b / a) for a, b in pairwise(raw)) > 100


def test_interference_names_the_pair_and_the_place(steady: Ran, healthy: Ran) -> None:
    gradients: Any = steady.series("gradients")
    wanted = {}
    for client, traced in gradients.items():
        cosines = [traced[epoch]["prototypes"]["cosine"]["base · alignment"] for epoch in range(1, 7)]
        ends = [epoch for epoch in range(3, 7) if max(cosines[epoch - 3 : epoch]) < -0.1]
        wanted |= {client: (ends[0], cosines[ends[0] - 1])} if ends else {}
    found = [each for each in steady.of("gradient-interference") if each.about == "base · alignment at the prototypes"]
    assert wanted and {each.client: (each.epoch, each.value) for each in found} == wanted
    assert all("base · alignment at the prototypes" in each.evidence for each in found)
    assert "gradient-interference" in healthy.diagnosis.looked


# --- clients, data and accuracy ---------------------------------------------------------------------------------------


def test_a_client_that_never_learned_is_told_by_its_loss_and_by_its_accuracy(still: Ran) -> None:
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


def test_shared_data_is_told(still: Ran) -> None:
    (finding,) = still.of("shared-data")
    assert finding.value == still.json("partition.json")["shared_samples"] > 0 and finding.client is None


def test_collapsed_features_are_told(collapsed: Ran) -> None:
    spread = collapsed.series("spread")
    wanted = {}
    for client, values in spread.items():
        ends = [epoch for epoch in (3, 4) if all(values[epoch - back] < 0.01 for back in range(3))]
        wanted |= {client: ends[0]} if ends else {}
    assert wanted and {each.client: each.epoch for each in collapsed.of("feature-collapse")} == wanted


def test_the_deep_check_measures_every_encoder(collapsed: Ran, healthy: Ran, digits: Dataset) -> None:
    deep, well = diagnose(collapsed.folder, deep=True, data=digits), diagnose(healthy.folder, deep=True)
    assert deep.geometry.keys() == {"client_000", "client_001"} == well.geometry.keys()
    flat, full = max(each.effective_rank for each in deep.geometry.values()), [*well.geometry.values()]
    assert flat < 3 < min(each.effective_rank for each in full) and all(
        each.nc1 < 1 and each.classes == 10 for each in full
    )
    told = {
        each.client
        for each in deep.findings
        if each.rule == "feature-collapse" and each.about in ("effective rank", "NC1")
    }
    assert told == deep.geometry.keys()


def test_classes_that_nobody_holds_and_pairs_that_plain_averaging_takes_in(collapsed: Ran, healthy: Ran) -> None:
    counts = collapsed.json("partition.json")["class_counts"]
    orphan, pairs = sorted(collapsed.of("prototype-never-trained"), key=lambda each: each.about)
    assert orphan.severity == "problem" and orphan.value == 1 and orphan.evidence.endswith(": 9")
    assert pairs.severity == "note" and pairs.value == sum(count == 0 for row in counts for count in row[:9]) > 0
    assert "prototype-never-trained" in healthy.diagnosis.looked


def test_pairs_are_no_matter_to_a_rule_that_asks_who_knows_a_class() -> None:
    """Doctored: two clients with one class each."""
    for fusion, wanted in (("iffi", 1), ("average", 1), ("typicality-gated", 0)):
        run = Run(
            recipe_of("fafi", 2, fusion=[fusion]).federated, counts={"a": [5, 0], "b": [0, 5]}, class_names=("x", "y")
        )
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


def test_a_client_that_its_rails_stopped_is_told_from_the_uploads_alone(folder: Path, digits: Dataset) -> None:
    place = folder / "stopped"
    stop = recipe_of(
        "etf-decoupled",
        6,
        alignment__weight__rate=2.0,
        rails__largest_weight=9.0,
        rails__on_explosion="stop",
        partition__clients=2,
    )
    with pytest.raises(RunError):
        simulate(stop, place, data=digits)
    assert not (place / "metrics.jsonl").exists() and not (place / "result.json").exists()
    told = diagnose(place)
    halted = {each.client: each for each in told.findings if each.rule == "diverged"}
    assert halted and told.run.stopped.keys() == halted.keys()
    for client, finding in halted.items():
        assert finding.severity == "problem" and finding.epoch == len(told.run.entries[client or ""]) < 6
        assert "out of range" in finding.evidence
    passed = {each.client: each.threshold for each in told.findings if each.rule == "exploding-lambda"}
    assert passed == dict.fromkeys(halted, 9.0)
    assert "fusion-worse-than-best-client" in told.aside


def test_a_run_under_way_is_read_from_states_and_uploads(folder: Path, digits: Dataset) -> None:
    class Stop(Exception):
        pass

    seen: list[dict[str, Any]] = []

    def stop(event: dict[str, Any]) -> None:
        seen.extend([event] if event["event"] == "epoch" else [])
        if len(seen) == 5:  # all three epochs of one client, the second of the other
            raise Stop

    place = folder / "under way"
    slow = recipe_of("fafi", 3, partition__clients=2, training__learning_rate=1e-7, local__checkpoint_seconds=0.0)
    with pytest.raises(Stop):
        simulate(slow, place, data=digits, emit=stop)
    told = diagnose(place)
    done, begun = seen[0]["client"], seen[4]["client"]
    assert {client: len(entries) for client, entries in told.run.entries.items()} == {done: 3, begun: 1}
    assert {each.client for each in told.findings if each.rule == "never-learned"} == {done}
    assert told.aside["fusion-worse-than-best-client"] == "not scored at the end of training"


# --- limits, on doctored histories -----------------------------------------------------------------------------------

ALIGNED = recipe_of("etf-decoupled", 40).federated
PLAIN = recipe_of("fafi", 20).federated


def history(recipe: Any, n: int = 20, **columns: Any) -> Run:
    """Doctored: one client; each column a list, or a value for all epochs."""
    entries = [
        {"epoch": epoch, **{name.replace("__", "-"): column[epoch - 1] if isinstance(column, list) else column for name, column in columns.items()}}
        for epoch in range(1, n + 1)
    ]  # fmt: skip
    return Run(recipe, {"a": entries}, {"a": [50, 50]}, ("x", "y"), 16, 0)


def seen(run: Run, rule: str) -> list[tuple[int | None, float]]:
    return [(each.epoch, each.value) for each in findings(run) if each.rule == rule]


def test_explosion_is_growth_or_the_rails_and_not_a_small_weight() -> None:
    """Doctored: the limit itself, either side of it."""

    def at(values: list[float], effective: list[float] | float = 0.0) -> list[tuple[int | None, float]]:
        return seen(history(ALIGNED, len(values), lambda_raw=values, lambda_effective=effective), "exploding-lambda")

    assert at([2.0] * 5 + [199.0]) == [] and at([2.0] * 5 + [200.0]) == [(6, 200.0)]
    assert at([0.1] * 5 + [49.0]) == [] and at([0.1] * 5 + [50.0]) == [(6, 50.0)]
    assert at([20.0] * 5 + [999.0]) == [] and at([20.0] * 5 + [1000.0, 5.0]) == [(6, 1000.0)]
    assert at([20.0, 30.0], [20.0, 1001.0]) == [(2, 1001.0)]
    assert at([2.0] * 3 + [200.0] * 3, [2.0] * 5 + [201.0]) == [(4, 200.0)], "whichever passes first"
    assert at([5.0, 5.0, math.inf]) == [(3, math.inf)] and at([0.0] * 5) == []
    assert at([1.0, 50.0, 100.0]) == [(3, 100.0)], "the start is the smallest of the first epochs"


def test_over_alignment_must_last() -> None:
    """Doctored: three epochs in a row, or a tenth of a long training."""

    def at(over: list[bool], recipe: Any = PLAIN) -> list[int | None]:
        run = history(recipe, len(over), lambda_effective=[2.0 if each else 1.0 for each in over], align=1.0, base=1.5)
        return [epoch for epoch, _ in seen(run, "over-alignment")]

    assert at([True, True, False] * 5) == [] and at([False, True, True, True, False]) == [4]
    assert at([False] + [True] * 3, ALIGNED) == [] and at([False] + [True] * 4, ALIGNED) == [5]
    assert at([True] * 3, recipe_of("fafi", 2).federated) == [2]


def test_swings_of_sigma_must_be_large_repeated_and_after_the_warm_up() -> None:
    """Doctored: σ² that goes up and down."""

    def at(values: list[float]) -> list[int | None]:
        run = history(ALIGNED, len(values), sigma_align=values, sigma_base=1.0, lambda_raw=1.0, lambda_effective=1.0)
        return [epoch for epoch, _ in seen(run, "unstable-sigma")]

    assert at([1.0, 1.0, *[1.0, 2.0] * 3]) == [7]
    assert at([1.0, 1.0, *[1.0, 1.4] * 6]) == [], "batch noise"
    assert at([1.0, 1.0, 1.0, 2.0, 1.0, 2.0]) == [], "twice is settling"
    assert at([9.0, 1.0, 9.0, 1.0, 9.0, 9.0, 9.0]) == [], "the warm-up"
    assert at([1.0, 1.0, *[1.0, 2.0, 1.0, *[1.0] * 8] * 3]) == [], "far apart"
    assert at([1.0, 1.0, 1.0, 9e3]) == [] and at([1.0, 1.0, 1.0, 1.1e4]) == [4], "a leap"
    assert at([2.0**n for n in range(20)]) == [], "growth is no swing"


def test_interference_needs_a_gradient_that_can_undo_the_other() -> None:
    """Doctored: cosines and norms."""

    def at(cosines: list[float | None], shorter: float = 1.0, weight: float = 1.0) -> list[int | None]:
        norm = {"base": 1.0, "alignment": shorter}
        traces = [{"prototypes": {"norm": norm, "cosine": {"base · alignment": cosine}}} for cosine in cosines]
        run = history(ALIGNED, len(cosines), gradients=traces, lambda_effective=weight)
        return [epoch for epoch, _ in seen(run, "gradient-interference")]

    assert at([-0.2, -0.2, -0.2]) == [3] and at([-0.2, -0.2, -0.1, -0.2, None, -0.2, -0.2]) == []
    assert at([-0.2] * 3, 0.04) == [] and at([-0.2] * 3, 0.04, 2.0) == [3], "λ makes it as strong as it acts"


def test_one_class_has_one_point_and_a_moment_is_no_collapse() -> None:
    """Doctored: spread."""
    assert seen(history(PLAIN, spread=0.009, classes_seen=2), "feature-collapse") == [(3, 0.009)]
    assert seen(history(PLAIN, spread=0.011, classes_seen=2), "feature-collapse") == []
    assert seen(history(PLAIN, spread=[0.001, 0.001, 0.5] * 7, classes_seen=2), "feature-collapse") == []
    alone = history(PLAIN, spread=0.001, classes_seen=2)
    assert seen(Run(PLAIN, alone.entries, {"a": [99, 1]}), "feature-collapse") == []
    assert seen(history(PLAIN, spread=0.001, classes_seen=1), "feature-collapse") == []


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
    assert "1 at its lowest (epoch 2)" in finding.evidence and "lost" in finding.advice

    def alone(accuracy: float, counts: list[int]) -> list[Finding]:
        return findings(
            Run(PLAIN, {"a": [{"epoch": 1, "base": 1.0}]}, {"a": counts}, alone={"a": {1: accuracy}}, tested=[30, 70])
        )

    assert [each.threshold for each in alone(0.3, [60, 40])] == [0.3] and alone(0.31, [60, 40]) == []
    assert alone(0.1, [97, 3]) == [], "a client of one class cannot do better"


def test_what_the_rails_did_is_told() -> None:
    """Doctored: an alignment that was dropped, and a mark no other rule tells."""
    clamp = recipe_of("etf-decoupled", 20, rails__on_explosion="clamp").federated
    dropped = {"lambda_raw": 5.0, "s": 1.0, "lambda_effective": [5.0] * 4 + [0.0] * 16}
    assert (
        seen(history(clamp, **dropped), "diverged") == [(5, 0.0)]
        and seen(history(ALIGNED, **dropped), "diverged") == []
    )
    assert seen(history(clamp, **{**dropped, "s": [1.0] * 4 + [0.0] * 16}), "diverged") == []
    marked = Run(
        PLAIN, {"a": [{"epoch": 1}, {"epoch": 2, "trouble": ["not-finite"]}, {"epoch": 3, "trouble": ["weight"]}]}
    )
    assert seen(marked, "diverged") == [(2, 1.0)]


def test_three_points_are_past_the_peak_and_fusion_must_beat_the_best_client() -> None:
    """Doctored: accuracies."""

    def at(curve: dict[int, float], alone: dict[str, dict[int, float]] | None = None) -> dict[str, float]:
        nine = recipe_of("fafi", 9).federated
        run = Run(nine, {"a": [{"epoch": 1}]}, curves={"iffi": curve, "average": {9: 0.9}}, alone=alone or {})
        return {each.rule: each.value for each in findings(run)}

    assert at({3: 0.6, 6: 0.58, 9: 0.571}) == {} and at({3: 0.6, 6: 0.58, 9: 0.57}) == {"past-its-peak": 3.0}
    assert at({3: 0.6, 9: 0.6}, {"a": {9: 0.6}, "b": {3: 0.9, 9: 0.5}}) == {}
    assert at({3: 0.6, 9: 0.6}, {"a": {9: 0.61}}) == {"fusion-worse-than-best-client": 0.6}
    assert at({3: 0.6}, {"a": {3: 0.61}}) == {}, "early, networks fuse badly"


def test_the_peak_is_sought_on_validation_data_where_there_is_some() -> None:
    """What the test data says of the best snapshot is not looked at then."""
    falling, rising = {3: 0.9, 6: 0.5, 9: 0.4}, {3: 0.3, 6: 0.8, 9: 0.9}
    run = Run(load("fafi", [("training.epochs", 9)]), curves={"iffi": falling}, validation={"iffi": rising})
    assert findings(run) == []
    (found,) = findings(Run(run.recipe, curves={"iffi": rising}, validation={"iffi": {3: 0.7, 6: 0.8, 9: 0.6}}))
    assert found.rule == "past-its-peak" and found.value == pytest.approx(20)
    assert "at epoch 6 " in found.evidence and "on validation data" in found.evidence and "--epochs 6" in found.advice


def test_of_equal_peaks_the_earliest_is_told() -> None:
    recipe = load("fafi", [("training.epochs", 9)])
    (found,) = findings(Run(recipe, curves={"iffi": {3: 0.6, 6: 0.6, 9: 0.5}}))
    assert "had 60.0 % at epoch 3 " in found.evidence and "about 3 epochs" in found.advice


def test_a_client_without_samples_is_none(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_of("fafi", 1).to_yaml())
    told = {"class_counts": [[3, 0], [0, 0], [1, 2]], "shared_samples": 0}
    (tmp_path / "partition.json").write_text(json.dumps(told))
    assert set(diagnose(tmp_path).run.counts) == {"client_000", "client_002"}


# --- geometry --------------------------------------------------------------------------------------------------------


def test_the_geometry_of_known_features() -> None:
    labels = torch.arange(4).repeat_interleave(25)
    simplex = F.normalize(torch.eye(4, dtype=torch.float64) - 0.25, dim=1)
    told = geometry_of(simplex[labels], labels + 3)
    assert told.classes == 4 and told.nc1 == pytest.approx(0, abs=1e-12) and told.nc2 == pytest.approx(0, abs=1e-12)
    assert told.effective_rank == pytest.approx(3)
    assert effective_rank(torch.ones(9, 5)) == pytest.approx(1, abs=1e-3) and effective_rank(
        torch.eye(5)
    ) == pytest.approx(5)
    noise = F.normalize(torch.randn(4000, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64), dim=1)
    assert geometry_of(noise, torch.arange(4000) % 4).nc1 > 100
    two = (
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double().repeat(5, 1)
        + torch.tensor([[0.1, 0.0]]) * torch.tensor([1, 1, -1, -1, 0, 0, 0, 0, 0, 0])[:, None]
    )
    assert geometry_of(two, torch.arange(10) % 2).nc1 == pytest.approx(
        0.004 / 0.5
    )  # 4 of 10 are 0.1 off; means (±½, ∓½) apart
    skewed = torch.eye(3, dtype=torch.float64)[torch.tensor([0, 0, 1, 2])]
    cosines = geometry_of(torch.stack([skewed[0], skewed[0], skewed[2], -skewed[2]]), torch.tensor([0, 0, 1, 2])).nc2
    means = torch.stack([skewed[0], skewed[2], -skewed[2]])
    unit = F.normalize(means - means.mean(0), dim=1)
    assert cosines == pytest.approx(float(sum(abs(unit[i] @ unit[j] + 0.5) for i, j in ((0, 1), (0, 2), (1, 2))) / 3))


# --- live ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exploded", "steady", "still", "collapsed"])
def test_what_is_told_live_is_what_is_found_afterwards(name: str, request: pytest.FixtureRequest) -> None:
    ran: Ran = request.getfixturevalue(name)
    told = [each.key for each in ran.told]
    assert len(set(told)) == len(told), "once each"
    afterwards = {each.key for each in ran.diagnosis.findings if each.about != "accuracy"}  # it needs the result
    upgraded = {key for key in told if key[3] == "warning" and (*key[:3], "problem") in told}
    passing = {
        key for key in set(told) - afterwards - upgraded if key[0] in ("fusion-worse-than-best-client", "past-its-peak")
    }
    assert set(told) - upgraded - passing == afterwards and afterwards
    first = next(each for each in ran.told if each.key in afterwards)
    assert any(each.epoch == first.epoch for each in ran.diagnosis.findings if each.key == first.key)


def test_a_resumed_run_is_not_told_again_what_it_had_found(exploded: Ran) -> None:
    """Doctored: the events of the last epochs once more, on a real folder."""
    told: list[Finding] = []
    passed: list[dict[str, Any]] = []
    watch = live(exploded.folder, told.append, passed.append)
    events = [{"event": "plan", "lines": [], "steps": 1, "epochs": 10}]
    events += [
        event
        for event in MetricsLog(exploded.folder / "metrics.jsonl")
        if event["event"] == "epoch" and event["epoch"] > 7
    ]
    for event in events:
        watch(event)
    assert told == [] and passed == events


def test_an_epoch_trained_again_after_a_kill_counts_once(exploded: Ran) -> None:
    """Doctored: collapsed features, the second epoch three times."""
    told: list[Finding] = []
    watch = live(exploded.folder, told.append)
    for epoch in (1, 2, 2, 2):
        watch({"event": "epoch", "client": "x", "epoch": epoch, "spread": 0.001})
    assert "feature-collapse" not in {each.rule for each in told}
    watch({"event": "epoch", "client": "x", "epoch": 3, "spread": 0.001})
    assert [(each.client, each.epoch) for each in told if each.rule == "feature-collapse"] == [("x", 3)]


def test_diagnosis_that_fails_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    passed: list[dict[str, Any]] = []
    watch = live(tmp_path / "nothing here", lambda finding: None, passed.append)
    for epoch in (1, 2):
        watch({"event": "epoch", "client": "a", "epoch": epoch})
    assert len(passed) == 2 and caplog.text.count("diagnosis while training ended") == 1


def test_live_is_cheap(exploded: Ran) -> None:
    """Doctored: five hundred epochs of a healthy client; milliseconds each against the seconds an epoch takes."""
    watch = live(exploded.folder, lambda finding: None)
    entry = next(e for e in MetricsLog(exploded.folder / "metrics.jsonl") if e["event"] == "epoch" and "gradients" in e)
    started = time.process_time()
    for epoch in range(1, 501):
        watch({**entry, "client": "x", "epoch": epoch, "lambda_raw": 1.0, "lambda_effective": 1.0})
    assert (time.process_time() - started) / 500 < 0.02


# --- the command -----------------------------------------------------------------------------------------------------


def command(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["diagnose", *words])
    return done.exit_code, " ".join(done.output.split())


def test_the_command_tells_findings_and_always_ends_well(exploded: Ran, healthy: Ran) -> None:
    code, said = command(str(exploded.folder))
    assert code == 0 and "problem exploding-lambda" in said and "10 of 10 epochs" in said
    assert all(
        f"{each.where}: {each.evidence}" in said and each.advice in said for each in exploded.of("exploding-lambda")
    )
    code, said = command(str(healthy.folder), "--deep")
    assert code == 0 and "no findings" in said and "found nothing" in said and "effective rank" in said
    assert all(rule in said for rule in healthy.diagnosis.looked) and "no learned σ" in said


def test_json_has_every_field_of_every_finding(exploded: Ran) -> None:
    done = CliRunner().invoke(app, ["diagnose", str(exploded.folder), "--json"])
    told = json.loads(done.output, parse_constant=pytest.fail)
    assert len(told["findings"]) == len(exploded.diagnosis.findings) > 0
    fields = {"rule", "severity", "client", "epoch", "value", "threshold", "evidence", "advice", "about"}
    assert all(each.keys() == fields for each in told["findings"])
    assert told["clients"] == {"client_000": 10, "client_001": 10, "client_002": 10}


def test_only_a_folder_without_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="not a run folder"):
        diagnose(tmp_path)
    assert CliRunner().invoke(app, ["diagnose", str(tmp_path)]).exit_code != 0


def test_what_is_damaged_is_left_out_and_said(tmp_path: Path, exploded: Ran) -> None:
    (tmp_path / "recipe.yaml").write_bytes((exploded.folder / "recipe.yaml").read_bytes())
    bare = diagnose(tmp_path)
    assert bare.findings == () and bare.looked == () and bare.remarks == ()
    for name in ("partition.json", "result.json", "broadcast.safetensors", "uploads/client_000.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{torn")
    doctored = [{"event": "epoch", "client": "a", "epoch": 1, "lambda_raw": "much", "gradients": {"features": 3}, "base": 1.0},
                {"event": "epoch", "epoch": "one"}, {"event": "client", "client": "a", "epoch": 1}, {"event": "snapshot"}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in doctored) + '{"torn')
    told = diagnose(tmp_path, deep=True)
    assert told.findings == () and told.run.entries == {"a": [{"epoch": 1, "base": 1.0}]}
    for part in (
        "partition.json",
        "result.json",
        "broadcast.safetensors",
        "client_000.safetensors",
        "deep check is left out",
    ):
        assert any(part in remark for remark in told.remarks), part


def test_every_rule_has_a_test_above() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{rule.name}"' in text for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES) == 11
