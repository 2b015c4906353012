"""Anchors are equal, far apart and the same for all; alignment measures what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from conftest import small_recipe
from oneround import acts
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.learning import Batch
from oneround.learning.alignment import Aligner
from oneround.learning.anchors import anchors
from oneround.reading import load


@pytest.mark.parametrize(("classes", "features"), [(2, 1), (2, 7), (10, 9), (10, 512), (100, 128)])
def test_a_simplex_etf_has_unit_rows_and_equal_angles(classes: int, features: int) -> None:
    frame = anchors.parse("etf").make(classes, features, 1).double()
    cosines = frame @ frame.T
    wanted = torch.full((classes, classes), -1 / (classes - 1)).double().fill_diagonal_(1)
    assert torch.allclose(cosines, wanted, atol=1e-6)
    assert features == 1 or not torch.equal(frame, anchors.parse("etf").make(classes, features, 2).double())
    assert torch.equal(frame, anchors.parse("etf").make(classes, features, 1).double())


def test_too_few_features_for_an_etf_is_said_with_both_numbers() -> None:
    with pytest.raises(
        RecipeError, match=r"10 classes need at least 9 features, this encoder has 8; .*anchors: random"
    ):
        anchors.parse("etf").make(10, 8, 1)
    assert anchors.parse("random").make(10, 8, 1).shape == (10, 8)


def test_anchor_lengths() -> None:
    for kind in ("etf", "random"):
        assert torch.allclose(anchors.parse(kind).make(5, 16, 1).norm(dim=1), torch.ones(5), atol=1e-6)
        long = anchors.parse({"kind": kind, "norm": "sqrt-features"}).make(5, 16, 1)
        assert torch.allclose(long.norm(dim=1), torch.full((5,), 4.0), atol=1e-5)


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
    for epoch in (0, 5, 10):
        made.begin_epoch(epoch, 10, 1.0)
        at[epoch] = [
            float(made.distance(Batch(batch.unit, batch.labels, point)))
            for point in (made.start, torch.lerp(made.start, made.anchors, 0.5), made.anchors)
        ]
    assert [np.argmin(at[epoch]) for epoch in (0, 5, 10)] == [0, 1, 2]
    assert max(at[0][0], at[5][1], at[10][2]) < 1e-6


def test_every_site_gets_the_same_anchors(digits: Dataset) -> None:
    recipe = acts.settle(small_recipe(alignment={"anchors": "etf"}), digits)
    sent = acts.prepare(recipe, digits.class_names, digits.shape)
    assert torch.equal(sent.extras["anchors"], anchors.parse("etf").make(10, sent.weights["prototypes"].shape[1], 1))
    read = type(sent).unpack(sent.pack())
    assert torch.equal(read.extras["anchors"], sent.extras["anchors"])
    assert sent.weights.keys() == read.weights.keys() and "anchors" not in read.weights
