"""Guards bound a learned λ; one that cannot is refused."""

from __future__ import annotations

import pytest

from oneround.config.load import load
from oneround.errors import RecipeError
from oneround.training.alignment.guards import guards
from oneround.training.alignment.weights import weights
from policies import number, rest


@pytest.mark.parametrize("gamma", [0.01, 0.02, 0.5])
def test_a_hinge_caps_however_well_alignment_succeeds(gamma: float) -> None:
    policy = weights.parse({"kind": "uncertainty", "attenuate": "loss"})
    found = rest(policy, guards.parse({"kind": "hinge", "gamma": gamma, "most": 50.0}), 4.0, 1e-7, 0.05)["most"]
    assert 45 < found < 100  # momentum carries it a little beyond; without a guard it goes to 8e8
    assert rest(policy, guards.parse("none"), 4.0, 1e-4, 0.05)["raw"] > 1000


def test_a_hinge_too_weak_to_cap_is_refused_and_why() -> None:
    with pytest.raises(RecipeError, match=r"gamma = 0.009 cannot cap λ at 50; must be ≥ s/\(2·most\) = 0.01"):
        load("v14", [("alignment.guard.gamma", 0.009)])
    load("v14", [("alignment.guard.gamma", 0.01)])


@pytest.mark.parametrize("kind", ["hinge", "inverse-variance"])
def test_a_guard_on_sigma_needs_sigma(kind: str) -> None:
    with pytest.raises(RecipeError, match=f"{kind} acts on σ, which weight: fixed does not have; use guard: clamp"):
        load("etf", [("alignment.guard", kind)])


def test_a_clamp_holds_any_weight() -> None:
    assert guards.parse({"kind": "clamp", "most": 7.0}).limit(number(1e9)) == 7.0
    assert guards.parse({"kind": "clamp", "most": 7.0}).limit(number(2.0)) == 2.0
    load("etf", [("alignment.guard", "clamp")])
