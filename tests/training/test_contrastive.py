"""Supervised contrast against its formula: hard negatives, made-up ones, past ones, a bank, classes that count alike."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning.losses import SupConLoss
from torch import Tensor
from torch.nn import functional as F

from oneround.training import Batch
from oneround.training.objective import Features, terms
from random_batches import random_batch


def supervised_contrastive(made: Batch, temperature: float) -> Tensor:
    return terms.parse({"kind": "supervised-contrastive", "temperature": temperature}).loss(made)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("n", "classes"), [(64, 5), (16, 12), (10, 40), (2, 2)])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_supcon_agrees_with_pytorch_metric_learning(seed: int, n: int, classes: int, temperature: float) -> None:
    """With many classes and few samples some anchors have no positive."""
    made = random_batch(n, classes, seed)
    ours = supervised_contrastive(made, temperature)
    theirs = SupConLoss(temperature=temperature)(made.unit, made.labels)
    assert abs(float(ours) - float(theirs)) < 1e-5 * max(1, abs(float(theirs)))


def test_some_of_those_batches_have_anchors_without_positives() -> None:
    lonely = [int((random_batch(16, 12, seed).labels.bincount() == 1).sum()) for seed in range(20)]
    assert min(lonely) > 0


def test_supcon_without_any_positive_is_zero_and_still_has_a_gradient() -> None:
    unit = F.normalize(torch.randn(3, 4), dim=1).requires_grad_()
    loss = supervised_contrastive(Batch(unit, torch.tensor([0, 1, 2]), torch.eye(3)), 0.07)
    loss.backward()
    assert float(loss) == 0 and torch.isfinite(unit.grad).all()


def test_supcon_floor_is_the_log_of_the_number_of_positives() -> None:
    made = Batch(F.normalize(torch.ones(33, 4), dim=1), torch.zeros(33, dtype=torch.long), torch.eye(1))
    assert abs(float(supervised_contrastive(made, 0.07)) - torch.log(torch.tensor(32.0))) < 1e-4


def made(n: int = 24, classes: int = 4, seed: int = 1) -> Batch:
    return random_batch(n, classes, seed, features=6, dtype=torch.float64)


def contrast(batch: Batch, **options: Any) -> float:
    return float(terms.parse({"kind": "supervised-contrastive", "temperature": 0.2, **options}).loss(batch))


def by_hand(batch: Batch, beta: float, queue: Features | None = None) -> list[float]:
    """L_i of every anchor with a positive, sum by sum."""
    unit, labels = batch.unit.numpy(), batch.labels.numpy()
    past = [] if queue is None else list(zip(queue.unit.numpy(), queue.labels.numpy(), strict=True))
    losses = []
    for i in range(len(unit)):
        positives = [float(unit[i] @ unit[j]) for j in range(len(unit)) if j != i and labels[j] == labels[i]]
        negatives = [float(unit[i] @ unit[j]) for j in range(len(unit)) if labels[j] != labels[i]]
        negatives += [float(unit[i] @ z) for z, y in past if y >= 0 and y != labels[i]]
        total = sum(math.exp(beta * s) for s in negatives)
        weights = [len(negatives) * math.exp(beta * s) / total for s in negatives]
        below = sum(math.exp(s / 0.2) for s in positives)
        below += sum(w * math.exp(s / 0.2) for w, s in zip(weights, negatives, strict=True))
        if positives:
            losses.append(-np.mean([s / 0.2 - math.log(below) for s in positives]))
    return losses


@pytest.mark.parametrize("beta", [0.0, 1.0, 5.0])
def test_hard_negatives_weigh_as_the_formula_says(beta: float) -> None:
    assert contrast(made(), beta=beta) == pytest.approx(np.mean(by_hand(made(), beta)))


def test_no_hardness_is_plain_contrast_and_no_gradient_goes_through_weights() -> None:
    assert contrast(made(), beta=0.0) == contrast(made())
    assert contrast(made(), beta=2.0) > contrast(made()), "hard negatives weigh more, so the loss is larger"
    alone = Batch(made().unit, torch.zeros(24, dtype=torch.int64), torch.eye(4, dtype=torch.float64))
    assert contrast(alone, beta=3.0) == pytest.approx(contrast(alone)), "no negatives, no change"
    unit = made().unit.clone().requires_grad_()
    term = terms.parse({"kind": "supervised-contrastive", "temperature": 0.2, "beta": 3.0})
    term.loss(Batch(unit, made().labels, made().prototypes)).backward()
    step, direction = 1e-6, torch.randn(unit.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    cosine = made().unit @ made().unit.T  # fixed: the weights are those of the batch as it was
    forth, back = (
        _loss_with_fixed_weights(unit.detach() + sign * step * direction, made().labels, cosine) for sign in (1, -1)
    )
    assert float((unit.grad * direction).sum()) == pytest.approx((forth - back) / (2 * step), rel=1e-5)


def _loss_with_fixed_weights(unit: Tensor, labels: Tensor, cosine: Tensor) -> float:
    same = labels[:, None] == labels
    positive, negative = same & ~torch.eye(len(unit), dtype=torch.bool), ~same
    weights = torch.where(negative, (3.0 * cosine).exp(), 0.0)
    weights = weights / weights.sum(1, keepdim=True) * negative.sum(1, keepdim=True) + positive
    below = (weights * (unit @ unit.T / 0.2).exp()).sum(1, keepdim=True).log()
    each = -((unit @ unit.T / 0.2 - below) * positive).sum(1) / positive.sum(1).clamp(min=1)
    return float(each.sum() / (positive.sum(1) > 0).sum())


def test_made_up_negatives_are_mixes_of_the_hardest() -> None:
    unit = F.normalize(torch.tensor([[1.0, 0, 0], [1, 0.1, 0], [0.6, 1, 0], [0.5, 0, 1], [-1, 0.2, 0]]).double(), dim=1)
    batch = Batch(unit, torch.tensor([0, 0, 1, 1, 1]), torch.eye(2, 3, dtype=torch.float64))
    similarity = unit @ unit.T / 0.2
    losses = []
    for i, positive in ((0, [1]), (1, [0]), (2, [3, 4]), (3, [2, 4]), (4, [2, 3])):
        negative = sorted(
            (j for j in range(5) if batch.labels[j] != batch.labels[i]), key=lambda j: -float(similarity[i, j])
        )
        mixes = [F.normalize(unit[negative[0]] + unit[j], dim=0) for j in negative[1:2]]
        below = sum(similarity[i, j].exp() for j in (*positive, *negative)) + sum(
            (unit[i] @ m / 0.2).exp() for m in mixes
        )
        losses.append(-sum(similarity[i, j] - below.log() for j in positive) / len(positive))
    assert contrast(batch, synthetic=1) == pytest.approx(float(sum(losses) / 5))
    assert contrast(made(3, 3), synthetic=60) >= 0, "fewer negatives than asked for are mixed as far as they go"


def test_balanced_contrast_gives_every_class_the_same_weight() -> None:
    """However many anchors a class has, and whichever classes are absent."""
    batch = made(30, 3)
    by_class = []
    for label in range(3):
        pairs = by_hand(batch, 0.0)
        kept = [loss for loss, own in zip(pairs, batch.labels.tolist(), strict=True) if own == label]
        by_class.append(np.mean(kept))
    assert contrast(batch, per_class=True) == pytest.approx(np.mean(by_class))
    more = Batch(batch.unit, batch.labels + 2, torch.randn(7, 6).double())
    assert contrast(more, per_class=True) == pytest.approx(np.mean(by_class)), "four classes nobody holds"
    counts = np.bincount(batch.labels.numpy())
    assert len(set(counts)) > 1 and contrast(batch) == pytest.approx(np.average(by_class, weights=counts))


def test_a_queue_adds_negatives_of_other_classes() -> None:
    past = made(40, seed=3)
    queue = Features(past.unit.clone(), torch.full((40,), -1))
    now = made(seed=2)
    batch = Batch(now.unit, now.labels, now.prototypes, queue=queue)
    assert contrast(batch) == pytest.approx(contrast(now)), "an empty queue adds nothing"
    queue.labels[:30] = past.labels[:30]
    for beta in (0.0, 2.0):
        assert contrast(batch, beta=beta) == pytest.approx(np.mean(by_hand(now, beta, queue)))
    assert contrast(batch) != pytest.approx(contrast(now))


@pytest.mark.parametrize("same_class", ["negatives", "ignored", "positives"])
def test_contrast_with_a_bank_is_its_formula(same_class: str) -> None:
    random = torch.Generator().manual_seed(3)
    z = F.normalize(torch.randn(12, 6, generator=random, dtype=torch.float64), dim=1)
    u = F.normalize(torch.randn(9, 6, generator=random, dtype=torch.float64), dim=1)
    y, v = torch.randint(0, 3, (12,), generator=random), torch.randint(0, 3, (9,), generator=random)
    rows = []
    for i in range(12):
        compared = [(float(z[i] @ z[j]) / 0.1, bool(y[i] == y[j])) for j in range(12) if j != i]
        for j in range(9):
            mine = bool(y[i] == v[j])
            if not (mine and same_class == "ignored"):
                compared.append((float(z[i] @ u[j]) / 0.1, mine and same_class == "positives"))
        below = np.log(sum(np.exp(s) for s, _ in compared))
        positives = [s - below for s, positive in compared if positive]
        rows += [-sum(positives) / len(positives)] if positives else []
    term = terms.parse({"kind": "bank-contrastive", "temperature": 0.1, "same_class": same_class})
    found = term.loss(Batch(z, y, torch.eye(3), bank=Features(u, v)))
    assert float(found) == pytest.approx(np.mean(rows), rel=1e-9)
