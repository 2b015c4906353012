"""λ: golden numbers of the original documents, rest points, and the threshold above which SGD on the prototypes diverges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import labelled, small_recipe
from oneround.data import partitions
from oneround.errors import RecipeError
from oneround.learning.alignment import Aligner, instability_threshold, label_entropy
from oneround.learning.guards import Guard, guards
from oneround.learning.schedules import consensus, schedules, spread
from oneround.learning.weights import Now, Weight, weights
from oneround.reading import load


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def now(state: dict[str, Tensor] | None = None, base: float = 4.0, align: float = 0.01, s: float = 1.0, entropy: float = 0.5, floor: float = 0.0) -> Now:  # fmt: skip
    return Now(number(base), number(floor), number(align), number(s), number(entropy), state or {})


# --- golden numbers --------------------------------------------------------------------------------------------------


def test_the_entropies_and_weights_of_seed_002() -> None:
    """50,000 labels, ten classes, five clients, α = 0.05, seed 1: the partition of the document, and its table."""
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
def test_the_schedule_and_effective_weights_of_seed_004(round_: int, raw: float, s: float, effective: float) -> None:
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
    repaired = weights.of(load("etf-uncertainty-repaired").alignment.weight)  # type: ignore[union-attr]
    assert repaired.variables(0.9) == {"a": -1.0, "b": 0.0} and repaired.pace() == (0.01, True)


def test_schedules_over_the_whole_training() -> None:
    along = [0.0, 0.25, 0.5, 1.0]
    assert [schedules.parse("constant").factor(p, 0.3) for p in along] == [1, 1, 1, 1]
    assert [schedules.parse("linear").factor(p, 0.3) for p in along] == [1, 0.75, 0.5, 0]
    cosine = [schedules.parse("cosine").factor(p, 0.3) for p in along]
    assert np.allclose(cosine, [1, (1 + math.sqrt(0.5)) / 2, 0.5, 0])
    assert [schedules.parse("consensus").factor(p, 0.3) for p in along] == [0.3] * 4


def test_consensus_is_the_spread_over_the_first_spread() -> None:
    apart = [torch.tensor([[0.0, 2.0]]), torch.tensor([[4.0, 2.0]])]
    assert spread(apart) == 1.0  # standard deviations 2 and 0
    spreads = {1: 0.5, 2: 0.4, 3: 0.8}
    assert [consensus(spreads, done) for done in range(4)] == [1, 1, 0.8, 1]


# --- rest points -----------------------------------------------------------------------------------------------------


def rest(policy: Weight, guard: Guard, base: float, align: float, s: float) -> dict[str, float]:
    """Where gradient descent on the variables comes to rest under constant losses; also the memory of a policy that has one."""
    variables = {name: nn.Parameter(number(value)) for name, value in policy.variables(0.5).items()}
    memory = {name: number(value) for name, value in policy.memory().items()}
    descent = torch.optim.SGD(variables.values(), lr=0.05, momentum=0.9) if variables else None
    raw, seen_raw = number(0), []
    for _ in range(600):
        seen = now({**variables, **memory}, base, align, s)
        raw, loss = policy.raw(seen), policy.loss(seen)
        memory = policy.remember(seen)
        seen_raw.append(float(raw))
        if descent is not None and loss is not None:
            descent.zero_grad()
            (loss + guard.penalty(seen.state)).backward()
            descent.step()
    return {name: math.exp(value.item()) for name, value in variables.items()} | {
        "raw": float(raw),
        "most": max(seen_raw),
    }


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
    held = rest(weights.parse({"kind": "uncertainty", "attenuate": "log"}), guard, base, align, s)
    computed = rest(weights.parse({"kind": "equilibrium", "gamma": gamma, "most": 1e9}), free, base, align, s)
    assert np.isclose(held["raw"], s * base / (align + 2 * gamma), rtol=1e-3)
    assert np.isclose(computed["raw"], held["raw"], rtol=1e-3)
    assert rest(weights.parse({"kind": "fixed", "value": 3.0}), free, base, align, s)["raw"] == 3.0
    assert rest(weights.parse("entropy"), free, base, align, s)["raw"] == 0.1 + 0.5 * 9.9


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


@pytest.mark.parametrize(
    "guard", [{"kind": "hinge", "most": 3.0, "gamma": 1.0}, {"kind": "inverse-variance", "gamma": 0.5}]
)
def test_rescaling_leaves_a_guard_as_strong_as_it_is(guard: dict[str, Any]) -> None:
    """The penalty is rescaled with the rest: λ comes to rest where it does without rescaling."""
    pulls = []
    for how in (False, True):
        more = [("alignment.weight.rescale", how), ("alignment.weight.coupled", True), ("alignment.guard", guard)]
        recipe = load("v12", more)
        assert recipe.alignment is not None
        made = Aligner(recipe, recipe.alignment, torch.zeros(4, 6), torch.zeros(4, 6))
        made.begin_client(torch.tensor([5, 5, 5, 5]))
        made.begin_epoch(0, 10, 1.0)
        total = made.weigh(torch.tensor(2.0), torch.tensor(0.0), torch.tensor(0.3))
        pulls.append(torch.stack(torch.autograd.grad(total, [made.variables["a"], made.variables["b"]])))
        sigma = float(made.variables["a"].detach().exp())
    assert torch.allclose(pulls[1], 2 * sigma * pulls[0], rtol=1e-5)


# --- the threshold ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "diverges"), [(0.97, False), (1.03, True)])
def test_the_instability_threshold_of_sgd_on_the_prototypes(share: float, diverges: bool) -> None:
    recipe = small_recipe()
    classes, features = 10, 16
    weight = share * instability_threshold(recipe, classes, features)
    anchors, prototypes = torch.zeros(classes, features), nn.Parameter(torch.ones(classes, features))
    descent = torch.optim.SGD([prototypes], lr=recipe.training.learning_rate, momentum=recipe.training.momentum)
    for _ in range(2000):
        descent.zero_grad()
        (weight * (prototypes - anchors).square().mean()).backward()
        descent.step()
    assert (not math.isfinite(prototypes.norm().item()) or prototypes.norm().item() > 1e3) == diverges
    assert (prototypes.norm().item() < 1e-3) == (not diverges)


def test_the_threshold_of_the_reference_setting() -> None:
    assert instability_threshold(load("v12"), 10, 512) == pytest.approx(194_560)


def changed(**options: Any) -> Weight:
    return weights.parse({"kind": "uncertainty", **options})


def test_apply_raw_or_effective() -> None:
    assert changed().effective(number(10.0), number(0.3)) == 3.0
    assert changed(apply="raw").effective(number(10.0), number(0.3)) == 10.0
