"""Safeguards see what goes wrong in training, say it once and lose nothing that was learned."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients import SMALL, broadcast_of, few, prepared, some, trained
from conftest import small_recipe
from oneround import acts
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.runs.folder import RunFolder
from oneround.simulate import run
from oneround.site import Site
from oneround.training import Batch, safeguards
from oneround.training.alignment.aligner import Aligner


def test_a_loss_that_is_not_finite_stops_with_what_to_do(digits: Dataset) -> None:
    broadcast = prepared(digits, training__learning_rate=1e30, training__clip_norm=0.0, training__epochs=5)
    with pytest.raises(
        RunError,
        match=r"site, epoch \d: the loss or its gradient is not finite; likely cause: the steps are too large \(training.learning_rate = 1e\+30",
    ):
        acts.train(broadcast, some(digits, 200))


EXPLODING = {"training__epochs": 6, "alignment__weight__rate": 2.0, "safeguards__largest_weight": 8.0}


def test_a_weight_out_of_range_is_reported_with_client_epoch_weight_and_cause(digits: Dataset) -> None:
    events: list[dict[str, Any]] = []
    upload = acts.train(
        broadcast_of(digits, "etf-decoupled", **EXPLODING), Site("ward", few(digits, samples=96)), emit=events.append
    )
    trouble = [event["text"] for event in events if event["event"] == "trouble"]
    assert len(trouble) == 1, "reported once, not every epoch"
    first = next(entry for entry in upload.history if entry["lambda_effective"] > 8)
    assert trouble[0].startswith(
        f"ward, epoch {first['epoch']}, λ = {first['lambda_effective']:.4g}: λ is out of range"
    )
    assert "safeguards.largest_weight = 8" in trouble[0] and "L_base/(s·L_align)" in trouble[0]
    assert upload.epoch == 6 and not upload.stopped


def test_what_acted_is_judged_also_in_the_last_epoch(digits: Dataset) -> None:
    """s falls to 0 at the end, so λ·s as logged for the epoch to come is 0, whatever acted in the last."""
    upload = trained(digits, "v12", samples=96, training__epochs=4)
    for entry in upload.history:
        s = 1 - (entry["epoch"] - 1) / 4
        assert entry["lambda_applied"] == pytest.approx(entry["lambda_raw"] * s)
    assert upload.history[-1]["lambda_effective"] == 0 < upload.history[-1]["lambda_applied"]
    recipe = load("v12", [("safeguards.largest_weight", 100.0)])
    seen = {
        "epoch": 9,
        "loss": 1.0,
        "gradient_norm": 1.0,
        "base": 1.0,
        "align": 0.1,
        "s": 0.1,
        "sigma_align": 0.1,
        "spread": 1.0,
    }
    assert safeguards.check_epoch(recipe, {**seen, "lambda_raw": 500.0, "lambda_applied": 99.0}, 1e9) is None
    trouble = safeguards.check_epoch(
        recipe, {**seen, "lambda_raw": 500.0, "lambda_applied": 101.0, "lambda_effective": 0.0}, 1e9
    )
    assert trouble is not None and trouble.kind == "weight" and "λ = 101" in trouble.text


def test_a_stage_without_alignment_is_not_judged_by_its_weight(digits: Dataset) -> None:
    """λ keeps the value it had at the end of the stage before, and acts on nothing."""
    upload = trained(
        digits, "etf-decoupled", samples=96, **EXPLODING, objective__stages=[{"epochs": 4}, {"align": False}]
    )
    trouble = {entry["epoch"]: entry.get("trouble") for entry in upload.history}
    assert trouble[4] == ["weight"] and trouble[5] is trouble[6] is None
    assert upload.history[5]["lambda_applied"] > 8 and "align" not in upload.history[5]


def test_sigma_that_diverges_is_named_and_a_client_can_go_on_without_it(digits: Dataset) -> None:
    events: list[dict[str, Any]] = []
    wild = {"training__epochs": 3, "alignment__weight__rate": 1e6}
    acting = broadcast_of(digits, "v10", **wild, safeguards__on_explosion="clamp")
    upload = acts.train(acting, Site("ward", few(digits, samples=96)), emit=events.append)
    (text,) = {event["text"] for event in events if event["event"] == "trouble"}
    assert "σ diverged" in text and "alignment.weight.rate = 1e+06" in text and "its alignment is switched off" in text
    assert upload.epoch == 3 and not upload.stopped


def test_clamp_holds_the_weight_at_the_limit(digits: Dataset) -> None:
    upload = trained(digits, "etf-decoupled", samples=96, **EXPLODING, safeguards__on_explosion="clamp")
    assert max(entry["lambda_effective"] for entry in upload.history) == pytest.approx(8)
    assert max(entry["lambda_raw"] for entry in upload.history) > 8
    free = trained(digits, "etf-decoupled", samples=96, **EXPLODING)
    assert not torch.equal(upload.weights["prototypes"], free.weights["prototypes"])


def test_stop_ends_the_run_and_keeps_what_was_learned(digits: Dataset, tmp_path: Path) -> None:
    exploding = {key.replace("__", "."): value for key, value in EXPLODING.items()} | {
        "safeguards.on_explosion": "stop"
    }
    two_clients = {"partition.clients": 2, "partition.alpha": 0.5, "local.workers": 1, "snapshots": 0}
    with pytest.raises(RunError, match=r"client_00\d, epoch \d, λ = .*out of range.*stopped, its weights .* are kept"):
        run(load("etf-decoupled", SMALL | exploding | two_clients), tmp_path / "run", data=digits)
    uploads = RunFolder(tmp_path / "run").uploads()
    assert len(uploads) == 2 and all(0 < upload.epoch < 6 and upload.stopped for upload in uploads)
    assert acts.fuse(uploads, uploads.broadcast)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


class Poison:
    """Makes the loss infinite from a step on, by way of the anchors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        plain, self.steps = Aligner.distance, 0

        def distance(aligner: Aligner, batch: Batch) -> torch.Tensor:
            self.steps += 1
            return plain(aligner, batch) * (torch.inf if self.steps > after and float(aligner.ceiling) > 0 else 1.0)

        monkeypatch.setattr(Aligner, "distance", distance)


def test_an_epoch_that_is_not_finite_is_undone(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"training__epochs": 5, "trace__every": 0}
    good = acts.train(broadcast_of(digits, "etf", **options), Site("site", few(digits, samples=96)), until=2)
    Poison(monkeypatch, after=7)  # in the third epoch of three steps
    stopped = trained(digits, "etf", samples=96, **options)
    assert stopped.epoch == 2 and "epoch 3" in stopped.stopped and "not finite" in stopped.stopped
    assert all(torch.equal(value, good.weights[name]) for name, value in stopped.weights.items())


def test_clamp_drops_the_alignment_of_a_client_that_diverges(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    Poison(monkeypatch, after=7)
    upload = trained(digits, "etf", samples=96, training__epochs=5, trace__every=0, safeguards__on_explosion="clamp")
    assert upload.epoch == 5 and not upload.stopped
    assert [entry["lambda_effective"] for entry in upload.history] == [5, 5, 0, 0, 0]
    assert all(np.isfinite(entry["loss"]) for entry in upload.history)


def test_collapsed_features_are_reported_unless_the_client_has_one_class() -> None:
    measured = {"epoch": 3, "loss": 1.0, "gradient_norm": 1.0, "spread": 1e-6, "classes_seen": 4}
    trouble = safeguards.check_epoch(load("fafi"), measured, 1e5)
    assert trouble is not None and trouble.kind == "collapse" and "epoch 3" in trouble.text
    assert safeguards.check_epoch(load("fafi"), {**measured, "classes_seen": 1}, 1e5) is None
    assert safeguards.check_epoch(load("fafi"), {**measured, "spread": 0.2}, 1e5) is None


@pytest.mark.parametrize("learned", [{"sigma_align": 0.1}, {}], ids=["learned weight", "other weight"])
def test_the_summary_of_a_stop_has_no_figure_of_the_site(learned: dict[str, float]) -> None:
    recipe = small_recipe("etf", safeguards__largest_weight=8.0)
    measured = {"epoch": 4, "loss": 1.234, "gradient_norm": 1.0, "lambda_raw": 9.876, "lambda_applied": 9.876}
    measured |= {"base": 5.432, "align": 0.321, "s": 0.5, "classes_seen": 7} | learned
    for entry in (measured, measured | {"loss": math.nan}, measured | {"lambda_raw": 1.0, "spread": 1e-6}):
        trouble = safeguards.check_epoch(recipe, entry, 1e5)
        assert trouble is not None and "9.876" in trouble.text
        assert not re.search("λ|entropy|L_base|L_align", trouble.summary)
        assert re.findall(r"\d+(?:\.\d+)?", trouble.summary) in (["4"], ["4", "8"]), "the epoch, and the recipe's limit"
