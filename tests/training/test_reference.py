"""A reference distribution, and how far features are from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from clients import prepared
from conftest import small_recipe
from oneround.data import Dataset
from oneround.data.augment import preprocessing
from oneround.errors import RecipeError
from oneround.site import Site
from oneround.training import Batch, Learner
from oneround.training.bank import unit_features
from oneround.training.objective import terms
from oneround.training.reference import mmd, moments


@pytest.mark.parametrize(
    ("match", "source", "most"), [("moments", "public", 0.7), ("coral", "simplex", 0.95), ("mmd", "public", 0.7)]
)
def test_the_reference_moves_the_clients_features_towards_it(
    match: str, source: str, most: float, digits: Dataset
) -> None:
    """By its own measure, to at most that share of the distance training without it ends at."""
    few, apart = digits.train.take(torch.arange(200)), []
    term = terms.parse({"kind": "reference", "match": match})
    for weight in (0.0, 100.0):
        broadcast = prepared(
            digits, reference={"source": source, "teacher_epochs": 10}, public=0.1, training__epochs=12,
            objective__terms__reference={"match": match, "weight": weight},
        )  # fmt: skip
        learner = Learner(broadcast, Site("site", few))
        learner.train(12)
        seen = unit_features(learner.net, few.batches(torch.device("cpu"), *preprocessing(broadcast.recipe)))
        goal = broadcast.extras["reference.features"]
        apart.append(float(term.loss(Batch(seen, few.labels, learner.net.prototypes, reference=goal))))
    assert apart[1] < most * apart[0], apart


def test_distances_between_distributions() -> None:
    random = torch.Generator().manual_seed(0)
    one, other = (F.normalize(torch.randn(500, 5, generator=random, dtype=torch.float64), dim=1) for _ in range(2))
    shifted = F.normalize(other + torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64), dim=1)
    assert float(mmd(one, one)) == pytest.approx(0, abs=1e-12)
    assert float(mmd(one, shifted)) > 20 * float(mmd(one, other)) > 0
    mean, covariance = moments(one)
    assert np.allclose(mean, one.numpy().mean(0)) and np.allclose(covariance, np.cov(one.numpy().T, bias=True))


@pytest.mark.parametrize("source", ["public", "sphere", "simplex"])
def test_references_are_unit_vectors_of_the_size_asked_for(source: str, digits: Dataset) -> None:
    more = {"public": 0.1} if source == "public" else {}
    broadcast = prepared(digits, reference={"source": source, "size": 60, "teacher_epochs": 2}, **more)
    features = broadcast.extras["reference.features"]
    assert features.shape == (60, broadcast.weights["prototypes"].shape[1])
    assert torch.allclose(features.norm(dim=1), torch.ones(60), atol=1e-5)
    if source == "simplex":
        assert torch.allclose(features[:10] @ features[:10].T, torch.eye(10) * 10 / 9 - 1 / 9, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"reference": {}}, "reference: its features come from public images"),
        ({"objective__terms__reference": {}}, "objective.terms.reference: needs reference"),
        (
            {"public": 0.1, "reference": {"teacher": {"terms": {"reference": {}}}}},
            r"reference.*teacher.terms.reference: needs a reference, which a teacher does not have",
        ),
    ],
)
def test_a_reference_that_means_nothing_is_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        small_recipe("fafi", **changes)
