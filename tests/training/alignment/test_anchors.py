"""Anchors are equal, far apart and the same for all."""

from __future__ import annotations

import pytest
import torch

from conftest import small_recipe
from oneround import acts
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.training.alignment.anchors import anchors


@pytest.mark.parametrize(("classes", "features"), [(2, 1), (2, 7), (10, 9), (10, 512), (100, 128)])
def test_a_simplex_etf_has_unit_rows_and_equal_angles(classes: int, features: int) -> None:
    frame = anchors.parse("etf").make(classes, features, 1).double()
    cosines = frame @ frame.T
    expected = torch.full((classes, classes), -1 / (classes - 1)).double().fill_diagonal_(1)
    assert torch.allclose(cosines, expected, atol=1e-6)
    assert features == 1 or not torch.equal(frame, anchors.parse("etf").make(classes, features, 2).double())
    assert torch.equal(frame, anchors.parse("etf").make(classes, features, 1).double())


def test_too_few_features_for_an_etf_are_refused_with_both_numbers() -> None:
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


def test_every_site_gets_the_same_anchors(digits: Dataset) -> None:
    recipe = acts.resolve(small_recipe(alignment={"anchors": "etf"}), digits)
    sent = acts.prepare(recipe, digits.class_names, digits.shape)
    assert torch.equal(sent.extras["anchors"], anchors.parse("etf").make(10, sent.weights["prototypes"].shape[1], 1))
    read = type(sent).unpack(sent.pack())
    assert torch.equal(read.extras["anchors"], sent.extras["anchors"])
    assert sent.weights.keys() == read.weights.keys() and "anchors" not in read.weights
