"""Each preset does on real digits what defines it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from clients import broadcast_of, few, series, trained
from generating import TINY
from oneround import acts
from oneround.config.load import load, presets
from oneround.data import Dataset
from oneround.site import Site
from oneround.training.alignment.weights import weights

FAST = {"alignment__weight__rate": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in presets() if load(name).trains])
def test_a_preset_trains_a_client_that_uploads_nothing_but_the_network(name: str, digits: Dataset) -> None:
    preset = load(name)
    own = {"fusion": preset.plain()["fusion"]} if preset.model.head == "linear" or preset.stacked else {}
    beside = {"companion__teacher__encoder": {"kind": "cnn", "width": 4}} if preset.companion else {}
    beside |= TINY if preset.generator else {}
    broadcast = replace(broadcast_of(digits, name, 2, **own, **beside), depths={"site": 1} if preset.share else {})
    upload = acts.train(broadcast, Site("site", few(digits, 3, 40)))
    assert upload.weights.keys() == broadcast.weights.keys()
    assert all(np.isfinite(series(upload, "loss")))


def test_the_documented_names_and_aliases() -> None:
    alias = {name: raw["about"].get("alias") for name, raw in presets().items()}
    expected = {"fafi": "v4", "bank": "v5", "two-stage": "v6", "etf": "v7", "etf-progressive": "v8", "etf-entropy": "v9", "etf-uncertainty": "v10",
              "etf-annealed": "v11", "etf-attenuated": "v12", "etf-guarded": "v13", "etf-hinge": "v14"}  # fmt: skip
    assert expected.items() <= alias.items()
    assert {"etf-uncertainty-repaired", "etf-decoupled", "etf-decaying", "etf-equilibrium"} <= alias.keys()
    assert load("v9").method == "etf-entropy" and load("v9").digest == load("etf-entropy").digest


def test_a_preset_is_its_parts_and_not_its_name(digits: Dataset) -> None:
    named = trained(digits, "v9", 1)
    other = trained(digits, "v9", 1, method="something else")
    assert all(torch.equal(value, other.weights[name]) for name, value in named.weights.items())


def test_v6_changes_its_loss_at_the_right_epoch(digits: Dataset) -> None:
    upload = trained(digits, "v6", 10)
    assert ["bank-contrastive" in entry for entry in upload.history] == [True] * 2 + [False] * 8
    assert ["cross-entropy" in entry for entry in upload.history] == [False] * 2 + [True] * 8
    first, later = upload.history[1], upload.history[2]
    assert first["loss"] == pytest.approx(first["bank-contrastive"], rel=1e-5)
    four = ("cross-entropy", "supervised-contrastive", "prototype-feature", "prototype-separation")
    assert later["loss"] == pytest.approx(sum(later[name] for name in four), rel=1e-5)


def test_v9_pulls_the_client_with_more_classes_more(digits: Dataset) -> None:
    two, nine = trained(digits, "v9", 1, classes=2), trained(digits, "v9", 1, classes=9)
    assert series(two, "lambda_effective")[0] < series(nine, "lambda_effective")[0] < 10
    assert series(trained(digits, "v9", 1, classes=1), "lambda_effective")[0] == pytest.approx(0.1)


def test_v10_tends_to_the_ratio_of_the_losses(digits: Dataset) -> None:
    upload = trained(digits, "v10", 25)
    last = upload.history[-1]
    assert last["lambda_raw"] == pytest.approx(last["base"] / last["align"], rel=0.25)
    assert last["lambda_raw"] == pytest.approx(last["sigma_base"] / last["sigma_align"], rel=0.1)


NOTE_002 = {30: 16.7670, 26: 22.1632, 10: 4.5188, 20: 17.3472, 14: 11.2946}
"""Steps in the first epoch of each client of source note 002 (batches of 512) → V10's λ after it."""


def test_joint_clipping_gives_the_weights_of_source_note_002(digits: Dataset) -> None:
    """L_base begins near 10 and L_align near 1 on digits too, so λ after an epoch follows from the number of steps and the clipping."""

    def learned(preset: str, steps: int) -> float:
        return series(trained(digits, preset, 1, samples=32 * steps), "lambda_raw")[0]

    for steps, noted in NOTE_002.items():
        assert learned("v10", steps) == pytest.approx(noted, rel=0.3)
        assert learned("etf-uncertainty-unclipped", steps) > 1.4 * noted


def test_the_repairs_of_v10_change_the_start_and_the_pace_of_its_variances_and_nothing_else(digits: Dataset) -> None:
    plain, slow, ahead = (
        trained(digits, name, 1) for name in ("v10", "etf-uncertainty-slow", "etf-uncertainty-head-start")
    )
    for name in ("sigma_base", "sigma_align"):
        assert abs(np.log(series(slow, name)[0])) < 0.05
    assert series(ahead, "sigma_base")[0] < 0.7 * series(plain, "sigma_base")[0]
    own = [{key: value for key, value in load(name).plain().items() if key not in ("method", "alignment")} for name in
           ("v10", "etf-uncertainty-slow", "etf-uncertainty-head-start", "etf-uncertainty-unclipped")]  # fmt: skip
    assert own.count(own[0]) == len(own)


def test_v11_is_the_learned_weight_times_a_factor_from_outside(digits: Dataset) -> None:
    upload = trained(digits, "v11", 5)
    assert series(upload, "s") == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    raw, effective = np.array(series(upload, "lambda_raw")), np.array(series(upload, "lambda_effective"))
    assert np.allclose(effective, raw * [0.8, 0.6, 0.4, 0.2, 0.0], rtol=1e-5)


def test_v12_answers_a_falling_factor_with_a_larger_weight(digits: Dataset) -> None:
    steady, falling = (series(trained(digits, name, 20, **FAST), "lambda_raw") for name in ("etf-decoupled", "v12"))
    assert falling[-1] > 3 * steady[-1]
    assert falling[-1] > falling[len(falling) // 2] > falling[3]


RAW: dict[str, Any] = {**FAST, "training__batch_size": 16, "safeguards__largest_weight": 1e9}


def test_v12_as_it_exploded_aligns_with_raw_weights(digits: Dataset) -> None:
    recipe = load("etf-attenuated-raw")
    assert (
        recipe.alignment is not None
        and recipe.alignment.classes == "all"
        and recipe.alignment.schedule.kind == "cosine"
    )
    assert weights.of(recipe.alignment.weight).pace() == (0.1, True) and recipe.training.learning_rate == 0.05
    document, raw = (trained(digits, name, 30, samples=160, **RAW) for name in ("v12", "etf-attenuated-raw"))
    assert series(raw, "lambda_applied") == series(raw, "lambda_raw")
    assert series(document, "lambda_applied")[-1] < 0.1 * series(document, "lambda_raw")[-1]
    assert series(raw, "s") == pytest.approx(
        [(1 + np.cos(np.pi * (epoch + 1) / 30)) / 2 for epoch in range(30)], abs=1e-6
    )
    assert series(raw, "lambda_applied")[-1] > 100 * series(raw, "lambda_applied")[0]


@pytest.mark.parametrize("preset", ["etf-guarded-raw", "etf-hinge-raw", "etf-clamped-raw"])
def test_guards_bound_the_raw_weight_that_acts(digits: Dataset, preset: str) -> None:
    free, guarded = (trained(digits, name, 30, samples=160, **RAW) for name in ("etf-attenuated-raw", preset))
    bound = max(series(guarded, "base")) / (2 * 0.04) if preset == "etf-guarded-raw" else 50.0
    assert max(series(guarded, "lambda_applied")) <= 1.1 * bound < 0.5 * series(free, "lambda_applied")[-1]
    own = load("etf-attenuated-raw").plain(), load(preset).plain()
    assert [{**each, "method": "", "alignment": {**each["alignment"], "guard": None}} for each in own[:1]] == [
        {**each, "method": "", "alignment": {**each["alignment"], "guard": None}} for each in own[1:]
    ]


def test_v13_never_exceeds_its_bound(digits: Dataset) -> None:
    upload = trained(digits, "v13", 20, **FAST)
    bound = max(series(upload, "base")) / (2 * 0.04)
    assert max(series(upload, "lambda_raw")) <= bound
    assert min(series(upload, "sigma_align")) >= 0.9 * 2 * 0.04
    free = trained(digits, "v12", 20, **FAST)
    assert series(free, "lambda_raw")[-1] > series(upload, "lambda_raw")[-1]


@pytest.mark.parametrize(("preset", "changes"), [("etf-decaying", FAST), ("etf-equilibrium", {})])
def test_decaying_and_equilibrium_go_to_zero_with_the_factor(digits: Dataset, preset: str, changes: Any) -> None:
    weights = series(trained(digits, preset, 20, **changes), "lambda_effective")
    assert weights[-1] < 0.25 * max(weights)
    assert weights[-1] < weights[-3] < weights[-6]
