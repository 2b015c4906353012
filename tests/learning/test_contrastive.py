"""Negatives and balance: hard ones, made-up ones, past ones, and classes that count alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import small_recipe
from oneround import acts
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.learning import Batch, Learner
from oneround.learning.bank import unit_features
from oneround.learning.batches import batches
from oneround.learning.memory import FeatureQueue, log_prior
from oneround.learning.objective import Features, terms
from oneround.learning.reference import mmd, moments
from oneround.protocol import Broadcast
from oneround.protocol.model import preprocessing
from oneround.sections import Queue, Training
from oneround.site import Site


def made(n: int = 24, classes: int = 4, seed: int = 1, **more: Any) -> Batch:
    random = torch.Generator().manual_seed(seed)
    unit = F.normalize(torch.randn(n, 6, generator=random, dtype=torch.float64), dim=1)
    labels = torch.randint(0, classes, (n,), generator=random)
    return Batch(unit, labels, torch.randn(classes, 6, generator=random, dtype=torch.float64), **more)


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
    assert contrast(made(), beta=2.0) > contrast(made()), "hard negatives weigh more, so there is more to lose"
    alone = Batch(made().unit, torch.zeros(24, dtype=torch.int64), torch.eye(4, dtype=torch.float64))
    assert contrast(alone, beta=3.0) == pytest.approx(contrast(alone)), "no negatives, no change"
    unit = made().unit.clone().requires_grad_()
    term = terms.parse({"kind": "supervised-contrastive", "temperature": 0.2, "beta": 3.0})
    term.loss(Batch(unit, made().labels, made().prototypes)).backward()
    step, direction = 1e-6, torch.randn(unit.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    cosine = made().unit @ made().unit.T  # held: the weights are those of the batch as it was
    there, back = (_held_weights(unit.detach() + sign * step * direction, made().labels, cosine) for sign in (1, -1))
    assert float((unit.grad * direction).sum()) == pytest.approx((there - back) / (2 * step), rel=1e-5)


def _held_weights(unit: Tensor, labels: Tensor, cosine: Tensor) -> float:
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
    """However many anchors a class has, and whichever classes are not there at all."""
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


def test_a_queue_adds_negatives_of_other_classes_and_starts_empty() -> None:
    queue = FeatureQueue(Queue(size=40, warm_up=1), 6, torch.device("cpu"))
    queue.features.unit.data = queue.features.unit.double()
    now = made(seed=2)
    empty = Batch(now.unit, now.labels, now.prototypes, queue=queue.features)
    assert contrast(empty) == pytest.approx(contrast(now))
    queue.begin_epoch(0)
    queue.push(made(seed=3))
    assert (queue.features.labels == -1).all(), "what warms up is not kept"
    queue.begin_epoch(1)
    queue.push(made(seed=3))
    queue.push(made(seed=4))
    kept = torch.cat([made(seed=4).unit, made(seed=3).unit])[:40]
    assert torch.equal(queue.features.unit, kept), "the newest first, the oldest fall out"
    for beta in (0.0, 2.0):
        assert contrast(empty, beta=beta) == pytest.approx(np.mean(by_hand(now, beta, queue.features)))


def prepared(digits: Dataset, preset: str = "fafi", **changes: Any) -> Broadcast:
    recipe = acts.settle(small_recipe(preset, **changes), digits)
    server = Site("server", digits.train.take(torch.arange(1000, 1200)))
    return acts.prepare(recipe, digits.class_names, digits.shape, server)


def test_a_queue_never_holds_another_clients_features(digits: Dataset, tmp_path: Path) -> None:
    """Clients take turns on one network in one process; what one leaves behind must not reach the next."""
    broadcast = prepared(digits, queue={"size": 256, "warm_up": 0}, training__epochs=4)
    mine, theirs = digits.train.take(torch.arange(100)), digits.train.take(torch.arange(200, 330))
    alone = acts.train(broadcast, Site("mine", mine))
    acts.train(broadcast, Site("theirs", theirs, tmp_path / "theirs"), until=2)
    after = acts.train(broadcast, Site("mine", mine, tmp_path / "mine"), until=2)
    acts.train(broadcast, Site("theirs", theirs, tmp_path / "theirs"), until=3)
    resumed = acts.train(broadcast, Site("mine", mine, tmp_path / "mine"))
    assert after.epoch == 2 and resumed.content == alone.content
    labels = set(Learner(broadcast, Site("mine", mine)).stepper.queue.features.labels.tolist())  # type: ignore[union-attr]
    assert labels == {-1}
    assert alone.content != acts.train(prepared(digits, training__epochs=4), Site("mine", mine)).content, "it counts"


def test_balanced_batches_have_every_class_equally_often() -> None:
    labels = torch.tensor([0] * 70 + [3] * 25 + [7] * 5)
    training = Training(batch_size=20, sampling="balanced")
    plan = batches(labels, training, torch.Generator().manual_seed(1))
    drawn = torch.cat(plan)
    assert [len(batch) for batch in plan] == [20] * 5
    assert sorted(labels[drawn].bincount()[[0, 3, 7]].tolist()) == [33, 33, 34]
    assert drawn[labels[drawn] == 3].unique(return_counts=True)[1].tolist().count(2) in (8, 9), "all before any again"
    assert max(int((labels[batch] == 7).sum()) for batch in plan) <= 9, "mixed evenly"
    assert torch.cat(batches(labels, Training(batch_size=20), torch.Generator().manual_seed(1))).unique().numel() == 100


def test_logit_adjustment_adds_the_log_of_the_clients_shares() -> None:
    counts = torch.tensor([90, 10, 0, 0])
    batch = made(prior=log_prior(counts).double())
    logits = batch.unit @ batch.prototypes.T + 0.5 * torch.log((counts + 1e-8) / 100).double()
    found = terms.parse({"kind": "cross-entropy", "adjust": 0.5}).loss(batch)
    assert float(found) == pytest.approx(float(F.cross_entropy(logits, batch.labels)), rel=1e-6)


# --- reference -------------------------------------------------------------------------------------------------------


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
        ({"queue": {"size": 0}}, "queue.size"),
        (
            {"queue": {}, "objective__terms": {"cross-entropy": {}}},
            "queue: no term uses it",
        ),
        (
            {"objective__terms__distillation": {}},
            "objective.terms.distillation: copies a teacher, and clients have none",
        ),
        (
            {"public": 0.1, "reference": {"teacher": {"terms": {"reference": {}}}}},
            r"reference.*teacher.terms.reference: needs a reference, which a teacher does not have",
        ),
        (
            {"public": 0.1, "bank": {"teacher": {"terms": {"distillation": {}}}}},
            r"bank.*needs a teacher, which a teacher",
        ),
    ],
)
def test_compositions_that_mean_nothing_are_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        small_recipe("fafi", **changes)
