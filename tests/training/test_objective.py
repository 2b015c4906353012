"""The losses are the formulas; stages follow each other over the whole training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from clients import trained
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.training.objective import active, evaluate, log_prior, stage_of, terms
from random_batches import random_batch


def test_fafi_is_the_sum_of_its_four_terms() -> None:
    made = random_batch(32, 5, 0)
    total, values = evaluate(active(load("fafi").objective), made)
    z, y, p = made.unit.double(), made.labels, made.prototypes.double()
    log_softmax = (z @ p.T) - (z @ p.T).exp().sum(1, keepdim=True).log()
    ce = -log_softmax[torch.arange(32), y].mean()
    separation = -((p @ p.T) - (p @ p.T).logsumexp(1, keepdim=True)).diagonal().mean()
    similarity = z @ z.T / 0.07
    rows = []
    for i in range(32):
        others = [j for j in range(32) if j != i]
        denominator = sum(torch.exp(similarity[i, j]) for j in others).log()
        positives = [j for j in others if y[j] == y[i]]
        rows.append(-sum(similarity[i, j] - denominator for j in positives) / len(positives))
    contrast = sum(rows) / len(rows)
    expected = {
        "cross-entropy": ce,
        "supervised-contrastive": contrast,
        "prototype-feature": ce,
        "prototype-separation": separation,
    }
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert abs(float(values[name]) - float(value)) < 1e-5, name
    assert abs(float(total) - float(sum(expected.values()))) < 1e-4


def test_weights_scale_terms_and_zero_leaves_them_out() -> None:
    made = random_batch(32, 5, 0)
    plain, values = evaluate(active(load("fafi").objective), made)
    changed = load(
        "fafi", [("objective.terms.cross-entropy.weight", 3.0), ("objective.terms.prototype-separation.weight", 0.0)]
    )
    total, left = evaluate(active(changed.objective), made)
    assert "prototype-separation" not in left
    assert abs(float(total) - float(plain + 2 * values["cross-entropy"] - values["prototype-separation"])) < 1e-4


def test_temperatures_divide_the_logits() -> None:
    made = random_batch(32, 5, 0)
    changed = load("fafi", [("objective.terms.prototype-feature.temperature", 0.5)])
    _, values = evaluate(active(changed.objective), made)
    expected = F.cross_entropy(made.unit @ made.prototypes.T / 0.5, made.labels)
    assert torch.allclose(values["prototype-feature"], expected)


def test_smoothing_gives_every_class_a_share_of_the_label() -> None:
    made = random_batch(32, 5, 0)
    term = terms.parse({"kind": "smoothed-cross-entropy", "smoothing": 0.2})
    log_shares = made.logits.log_softmax(1)
    expected = -(0.8 * log_shares[range(32), made.labels] + 0.2 * log_shares.mean(1)).mean()
    assert torch.allclose(term.loss(made), expected) and not torch.allclose(
        term.loss(made), F.cross_entropy(made.logits, made.labels)
    )


@pytest.mark.parametrize("temperature", [0.2, 3.0])
def test_each_prototype_term_has_its_own_temperature(temperature: float) -> None:
    made = random_batch(32, 5, 0)
    z, y, p = made.unit.double(), made.labels, made.prototypes.double()
    features, prototypes = z @ p.T / temperature, p @ p.T / temperature
    expected = {
        "prototype-feature": -(features - features.logsumexp(1, keepdim=True))[torch.arange(32), y].mean(),
        "prototype-separation": -(prototypes - prototypes.logsumexp(1, keepdim=True)).diagonal().mean(),
    }
    _, plain = evaluate(active(load("fafi").objective), made)
    for name, value in expected.items():
        changed = load("fafi", [(f"objective.terms.{name}.temperature", temperature)])
        _, values = evaluate(active(changed.objective), made)
        assert abs(float(values[name]) - float(value)) < 1e-5, name
        assert all(torch.equal(values[other], plain[other]) for other in plain if other != name)


def test_the_idle_terms_of_fafi_and_the_temperatures_that_wake_them(digits: Dataset) -> None:
    """With as many features as a real encoder has, separation has no gradient at all, and prototype-feature is cross-entropy twice."""
    wide: dict[str, Any] = {"model__encoder": {"kind": "cnn", "width": 32}, "trace__every": 1}
    plain = trained(digits, "fafi", 2, **wide)
    key = "objective__terms__{}__temperature".format
    warm = trained(digits, "fafi", 2, **wide, **{key("prototype-separation"): 50.0, key("prototype-feature"): 0.2})
    for entry in plain.history:
        at = entry["gradients"]
        assert entry["prototype-separation"] == at["prototypes"]["norm"]["prototype-separation"] == 0
        for tensor in ("features", "prototypes"):
            assert at[tensor]["norm"]["prototype-feature"] == pytest.approx(
                at[tensor]["norm"]["cross-entropy"], rel=1e-5
            )
            assert at[tensor]["cosine"]["cross-entropy · prototype-feature"] == pytest.approx(1, abs=1e-5)
    for entry in warm.history:
        at = entry["gradients"]
        assert at["prototypes"]["norm"]["prototype-separation"] > 0.1 * at["prototypes"]["norm"]["cross-entropy"]
        assert at["features"]["cosine"]["cross-entropy · prototype-feature"] < 0.97


def test_a_prior_is_the_log_of_the_shares_and_rules_out_an_absent_class() -> None:
    prior = log_prior(torch.tensor([30, 10, 0]))
    assert torch.allclose(prior[:2], torch.tensor([0.75, 0.25]).log(), atol=1e-6)
    assert torch.isfinite(prior).all() and float(prior[2]) < -20


def test_logit_adjustment_adds_the_log_of_the_clients_shares() -> None:
    counts = torch.tensor([90, 10, 0, 0])
    batch = random_batch(24, 4, 1, features=6, dtype=torch.float64, prior=log_prior(counts).double())
    logits = batch.unit @ batch.prototypes.T + 0.5 * torch.log((counts + 1e-8) / 100).double()
    found = terms.parse({"kind": "cross-entropy", "adjust": 0.5}).loss(batch)
    assert float(found) == pytest.approx(float(F.cross_entropy(logits, batch.labels)), rel=1e-6)


def test_stages_over_all_epochs() -> None:
    def at(epochs: int, first: dict[str, Any]) -> list[int]:
        plan = [{**first, "terms": {"bank-contrastive": 1.0}}, {"terms": {"cross-entropy": 1.0}}]
        objective = load("v6", [("objective.stages", plan), ("training.epochs", max(epochs, 2))]).objective
        return [stage_of(objective, epoch, epochs) for epoch in range(epochs)]

    assert at(50, {"share": 0.2}) == [0] * 10 + [1] * 40
    assert at(50, {"share": 0.4}) == [0] * 20 + [1] * 30
    assert at(50, {"epochs": 7}) == [0] * 7 + [1] * 43
    assert at(3, {"share": 0.01}) == [0, 1, 1]
    assert at(3, {"share": 0.99}) == [0, 0, 1]
    assert stage_of(load("fafi").objective, 3, 5) == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training.epochs": 1}, "must be ≥ 2, as many as objective.stages name"),
        (
            {"training.epochs": 10, "objective.stages.0": {"epochs": 10, "terms": {"bank-contrastive": 1.0}}},
            "training.epochs = 10: must be ≥ 11",
        ),
        ({"objective.stages.7.share": 0.5}, "'7' is no index of a list of 2; use 0 to 1"),
    ],
)
def test_stages_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load("v6", changes.items())
