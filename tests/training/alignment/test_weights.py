"""λ: golden numbers of the source notes and rest points."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from conftest import labelled
from oneround.config.load import load
from oneround.data import partitions
from oneround.training.alignment.aligner import label_entropy
from oneround.training.alignment.guards import guards
from oneround.training.alignment.schedules import schedules
from oneround.training.alignment.weights import Weight, weights
from policies import now, number, rest


def test_the_entropies_and_weights_of_source_note_002() -> None:
    """50,000 labels, ten classes, five clients, α = 0.05, seed 1: the partition of the note, and its table."""
    data = labelled(np.repeat(np.arange(10), 5000))
    counts = partitions.parse({"kind": "dirichlet", "clients": 5, "alpha": 0.05}).split(data, 1).counts
    assert counts[0].tolist() == [3651, 0, 4858, 2, 1764, 0, 0, 0, 0, 4999]
    normalised = [label_entropy(torch.from_numpy(row)) for row in counts]
    policy = weights.parse("entropy")
    found = [float(policy.raw(now(entropy=value))) for value in normalised]
    assert [round(value * math.log2(10), 4) for value in normalised] == [1.9079, 1.7997, 0.6091, 1.1689, 1.7245]
    assert [round(value, 4) for value in normalised] == [0.5743, 0.5418, 0.1834, 0.3519, 0.5191]
    assert [round(value, 4) for value in found] == [5.7859, 5.4634, 1.9152, 3.5837, 5.2395]


@pytest.mark.parametrize(
    ("round_", "raw", "s", "effective"),
    [
        (0, 12.04, 0.980, 11.80),
        (9, 65.22, 0.800, 52.17),
        (14, 204658.41, 0.700, 143260.89),
        (15, 482429.48, 0.680, 328052.05),
        (19, 1516252.51, 0.600, 909751.50),
        (29, 4147315.36, 0.400, 1658926.14),
    ],
)
def test_the_schedule_and_effective_weights_of_source_note_004(
    round_: int, raw: float, s: float, effective: float
) -> None:
    """A log written after round e of 50 shows p = (e + 1)/50."""
    shown = schedules.parse("linear").factor((round_ + 1) / 50, 1.0)
    policy = weights.of(load("v12").alignment.weight)  # type: ignore[union-attr]
    assert abs(shown - s) < 1e-9
    assert abs(float(policy.effective(number(raw), number(shown))) - effective) < 0.01


def test_a_learned_weight_is_the_ratio_of_the_variances() -> None:
    state = {"a": number(math.log(4.2)), "b": number(math.log(0.3))}
    for name in ("v10", "etf-decoupled", "v12", "v13"):
        policy = weights.of(load(name).alignment.weight)  # type: ignore[union-attr]
        assert abs(float(policy.raw(now(state))) - 4.2 / 0.3) < 1e-9


def test_a_learned_weight_starts_at_the_entropy_policys() -> None:
    start = weights.parse("uncertainty").variables(0.5743)
    assert abs(math.exp(start["a"] - start["b"]) - 5.7856) < 1e-3
    assert weights.of(load("v10").alignment.weight).variables(0.5743) == {"a": 0.0, "b": 0.0}  # type: ignore[union-attr]
    paces = {name: weights.of(load(name).alignment.weight).pace() for name in  # type: ignore[union-attr]
             ("v10", "etf-uncertainty-unclipped", "etf-uncertainty-slow", "etf-uncertainty-head-start")}  # fmt: skip
    assert list(paces.values()) == [(1.0, True), (1.0, False), (0.01, True), (1.0, True)]
    ahead = weights.of(load("etf-uncertainty-head-start").alignment.weight)  # type: ignore[union-attr]
    assert ahead.variables(0.5743) == {"a": -1.0, "b": 0.0}
    repaired = weights.of(load("etf-uncertainty-repaired").alignment.weight)  # type: ignore[union-attr]
    assert repaired.variables(0.9) == {"a": -1.0, "b": 0.0} and repaired.pace() == (0.01, True)


@pytest.mark.parametrize(("base", "align", "s"), [(4.0, 0.5, 1.0), (4.0, 0.05, 0.4), (9.0, 0.2, 0.1)])
def test_rest_points(base: float, align: float, s: float) -> None:
    free, gamma = guards.parse("none"), 0.04
    plain = rest(weights.parse({"kind": "uncertainty", "coupled": True, "start": [0.0, 0.0]}), free, base, align, s)
    assert np.allclose([plain["a"], plain["b"], plain["raw"]], [base, align, base / align], rtol=1e-3)
    attenuated = rest(weights.parse({"kind": "uncertainty", "attenuate": "loss"}), free, base, align, s)
    assert np.allclose([attenuated["a"], attenuated["b"]], [base, s * align], rtol=1e-3)
    assert np.isclose(attenuated["raw"], base / (s * align), rtol=1e-3)
    guard = guards.parse({"kind": "inverse-variance", "gamma": gamma})
    guarded = rest(weights.parse({"kind": "uncertainty", "attenuate": "loss"}), guard, base, align, s)
    assert np.isclose(guarded["b"], s * align + 2 * gamma, rtol=1e-3)
    assert guarded["raw"] <= base / (2 * gamma) * (1 + 1e-6)
    decaying = rest(weights.parse({"kind": "uncertainty", "attenuate": "log"}), free, base, align, s)
    assert np.isclose(decaying["raw"], s * base / align, rtol=1e-3)
    guarded_log = rest(weights.parse({"kind": "uncertainty", "attenuate": "log"}), guard, base, align, s)
    computed = rest(weights.parse({"kind": "equilibrium", "gamma": gamma, "most": 1e9}), free, base, align, s)
    assert np.isclose(guarded_log["raw"], s * base / (align + 2 * gamma), rtol=1e-3)
    assert np.isclose(computed["raw"], guarded_log["raw"], rtol=1e-3)
    assert rest(weights.parse({"kind": "fixed", "value": 3.0}), free, base, align, s)["raw"] == 3.0
    assert rest(weights.parse("entropy"), free, base, align, s)["raw"] == 0.1 + 0.5 * 9.9


def test_equilibrium_takes_the_floor_off_and_obeys_its_cap() -> None:
    policy = weights.parse({"kind": "equilibrium", "gamma": 0.04, "most": 50.0})
    memory = {name: number(value) for name, value in policy.memory().items()}
    first = float(policy.raw(now(memory, base=7.0, align=1.0, floor=5.0)))
    assert np.isclose(first, 2.0 / 1.08)  # already in the first step
    assert float(policy.raw(now(memory, base=7.0, align=1e-9, floor=0.0))) == 50.0
    assert float(policy.raw(now(memory, s=0.0))) == 0.0


def test_the_coupled_form_shrinks_the_networks_gradient_and_rescaling_undoes_it() -> None:
    state = {"a": number(math.log(8.0)), "b": number(0.0)}
    coupled = {"kind": "uncertainty", "coupled": True}
    assert np.isclose(float(weights.parse(coupled).scale(now(state))), 1 / 16)
    assert weights.parse({**coupled, "rescale": True}).scale(now(state)) == 1.0
    assert weights.parse("uncertainty").scale(now(state)) == 1.0
    plain, rescaled = (weights.parse({**coupled, "rescale": how}) for how in (False, True))
    assert np.isclose(float(rescaled.own_scale(now(state))), 16 * float(plain.own_scale(now(state))))


def changed(**options: Any) -> Weight:
    return weights.parse({"kind": "uncertainty", **options})


def test_apply_raw_or_effective() -> None:
    assert changed().effective(number(10.0), number(0.3)) == 3.0
    assert changed(apply="raw").effective(number(10.0), number(0.3)) == 10.0
