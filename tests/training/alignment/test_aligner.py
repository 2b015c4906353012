"""Alignment measures what it says; its state belongs to one client; SGD on the prototypes is stable up to a threshold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clients import broadcast_of, few, series, trained
from conftest import small_recipe
from oneround import acts
from oneround.config.load import load
from oneround.data import Dataset
from oneround.data.augment import preprocessing
from oneround.errors import RecipeError
from oneround.models.prototype import network_from
from oneround.protocol import blob
from oneround.site import Site
from oneround.training import Batch
from oneround.training.alignment.aligner import Aligner, instability_threshold
from oneround.training.alignment.anchors import anchors


def aligner(**options: object) -> tuple[Aligner, Batch]:
    recipe = load("etf", [(f"alignment.{key}", value) for key, value in options.items()])
    random = torch.Generator().manual_seed(0)
    start = torch.randn(5, 16, generator=random)
    made = anchors.parse("etf").make(5, 16, 1)
    assert recipe.alignment is not None
    unit = F.normalize(torch.randn(8, 16, generator=random), dim=1)
    batch = Batch(unit, torch.tensor([0, 0, 1, 3, 3, 3, 1, 0]), torch.randn(5, 16, generator=random))
    return Aligner(recipe, recipe.alignment, made, start), batch


def test_what_is_pulled_and_how_it_is_measured() -> None:
    made, batch = aligner()
    p, a = batch.prototypes.numpy(), made.anchors.numpy()
    assert np.isclose(float(made.distance(batch)), ((p - a) ** 2).mean(), rtol=1e-5)
    present = [0, 1, 3]
    found = float(aligner(classes="present")[0].distance(batch))
    assert np.isclose(found, ((p - a)[present] ** 2).mean(), rtol=1e-5)
    cosine = 1 - (p * a).sum(1) / np.linalg.norm(p, axis=1) / np.linalg.norm(a, axis=1)
    assert np.isclose(float(aligner(distance="cosine")[0].distance(batch)), cosine.mean(), rtol=1e-5)
    apart = batch.unit.numpy() - a[batch.labels.numpy()]
    assert np.isclose(float(aligner(target="features")[0].distance(batch)), (apart**2).mean(), rtol=1e-5)


def test_progressive_targets_wander_from_the_start_to_the_anchors_over_the_whole_training() -> None:
    made, batch = aligner(path="progressive")
    at = {}
    for epoch in (0, 25, 50):
        made.begin_epoch(epoch, 1.0)
        at[epoch] = [
            float(made.distance(Batch(batch.unit, batch.labels, point)))
            for point in (made.start, torch.lerp(made.start, made.anchors, 0.5), made.anchors)
        ]
    assert [np.argmin(at[epoch]) for epoch in (0, 25, 50)] == [0, 1, 2]
    assert max(at[0][0], at[25][1], at[50][2]) < 1e-6


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
        made.begin_epoch(0, 1.0)
        total = made.weigh(torch.tensor(2.0), torch.tensor(0.0), torch.tensor(0.3))
        pulls.append(torch.stack(torch.autograd.grad(total, [made.variables["a"], made.variables["b"]])))
        sigma = float(made.variables["a"].detach().exp())
    assert torch.allclose(pulls[1], 2 * sigma * pulls[0], rtol=1e-5)


TURNING = ("etf-cosine", "etf-norm", "etf-started", "etf-features")


def test_forms_of_alignment_that_turn_prototypes_where_v7_does_not(digits: Dataset) -> None:
    cosine = {
        name: series(trained(digits, name, 20, samples=160, training__batch_size=16), "anchor_cosine")[-1]
        for name in ("v7", *TURNING)
    }
    assert cosine["v7"] < 0.2
    assert min(cosine[name] for name in TURNING) > 0.9


def test_v7_shortens_prototypes_and_the_cosine_turns_them(digits: Dataset) -> None:
    v7, turned = (trained(digits, name, 20, samples=160, training__batch_size=16) for name in ("v7", "etf-cosine"))
    assert series(v7, "prototype_norm")[-1] < 0.8 * series(v7, "prototype_norm")[0]
    assert series(turned, "prototype_norm")[-1] > 0.95 * series(turned, "prototype_norm")[0]
    assert series(v7, "align")[-1] < 0.7 * series(v7, "align")[0], "the loss falls all the same"


def test_prototypes_begin_on_their_anchors(digits: Dataset) -> None:
    begun = broadcast_of(digits, "etf-started", 1)
    assert torch.equal(begun.weights["prototypes"], begun.extras["anchors"])
    assert begun.extras["anchors"].norm(dim=1).tolist() == pytest.approx([4.0] * 10), "√16"
    usual = broadcast_of(digits, "etf-started", 1, alignment__initial="random")
    others = [{name: value for name, value in each.weights.items() if name != "prototypes"} for each in (begun, usual)]
    assert all(torch.equal(value, others[1][name]) for name, value in others[0].items())
    assert not torch.equal(usual.weights["prototypes"], usual.extras["anchors"])
    with pytest.raises(RecipeError, match="path = progressive: prototypes begin on their anchors already"):
        load("etf-started", {"alignment.path": "progressive"})


def test_prototypes_that_are_fixed_stay_on_their_anchors_and_the_encoder_learns(digits: Dataset) -> None:
    broadcast = broadcast_of(digits, "fedsra", 2)
    upload = acts.train(broadcast, Site("site", few(digits)))
    assert torch.equal(upload.weights["prototypes"], broadcast.extras["anchors"])
    stem = "encoder.convolutions.0.weight"
    assert not torch.equal(upload.weights[stem], broadcast.weights[stem])
    free = acts.train(broadcast_of(digits, "fedsra", 2, alignment__initial="anchors"), Site("site", few(digits)))
    assert not torch.equal(free.weights["prototypes"], broadcast.extras["anchors"])
    with pytest.raises(
        RecipeError, match="initial = fixed: prototypes stay on their anchors, there is nothing to pull"
    ):
        load("etf", {"alignment.initial": "fixed"})


def test_a_client_with_one_class_minimises_the_alignment_alone(digits: Dataset) -> None:
    for classes, alone in ((1, True), (2, False)):
        (entry,) = trained(digits, "fedsra", 1, classes=classes).history
        assert entry["loss"] == pytest.approx(0.5 * entry["align"] + (0 if alone else entry["base"]), rel=1e-4)
    (entry,) = trained(digits, "fedsra", 1, classes=1, alignment__one_class="all").history
    assert entry["loss"] == pytest.approx(0.5 * entry["align"] + entry["base"], rel=1e-4)


def test_alignment_of_features_brings_features_to_the_anchors(digits: Dataset) -> None:
    own = few(digits)
    ends = {}
    for weight in (0.0, 5.0):
        broadcast = broadcast_of(
            digits,
            "etf-features",
            20,
            alignment__weight__value=weight,
            alignment__initial="random",
            model__encoder={"kind": "cnn", "width": 16},
        )
        upload = acts.train(broadcast, Site("site", own))
        net = network_from(broadcast.recipe.encoder, 1, 10, upload.weights).eval()
        mean, std = preprocessing(broadcast.recipe)
        with torch.no_grad():
            features = net.encoder((own.pixels.float() / 255 - mean) / std)
        ends[weight] = float(F.cosine_similarity(features, broadcast.extras["anchors"][own.labels]).mean())
    assert ends[5.0] > ends[0.0] + 0.1


def state_of(digits: Dataset, folder: Path, preset: str) -> set[str]:
    acts.train(broadcast_of(digits, preset, 3), Site("site", few(digits, 3), folder), until=1)
    return {name for name in blob.read(folder / "state.safetensors", "state")[1] if name.startswith("alignment.")}


def test_what_of_the_weight_is_kept_between_epochs(digits: Dataset, tmp_path: Path) -> None:
    assert state_of(digits, tmp_path / "a", "etf-equilibrium") == {
        f"alignment.{name}" for name in ("base", "align", "mass", "ceiling")
    }
    assert state_of(digits, tmp_path / "b", "v10") == {"alignment.a", "alignment.b", "alignment.ceiling"}


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
