"""The losses are the formulas."""

from __future__ import annotations

import pytest
import torch
from pytorch_metric_learning.losses import SupConLoss
from torch import Tensor
from torch.nn import functional as F

from oneround.learning import Batch
from oneround.learning.objective import active, evaluate, terms
from oneround.reading import load


def supervised_contrastive(made: Batch, temperature: float) -> Tensor:
    return terms.parse({"kind": "supervised-contrastive", "temperature": temperature}).loss(made)


def batch(n: int, classes: int, seed: int, features: int = 24) -> Batch:
    random = torch.Generator().manual_seed(seed)
    unit = F.normalize(torch.randn(n, features, generator=random), dim=1)
    labels = torch.randint(0, classes, (n,), generator=random)
    return Batch(unit, labels, torch.randn(classes, features, generator=random))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("n", "classes"), [(64, 5), (16, 12), (10, 40), (2, 2)])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_supcon_agrees_with_pytorch_metric_learning(seed: int, n: int, classes: int, temperature: float) -> None:
    """With many classes and few samples some anchors have no positive."""
    made = batch(n, classes, seed)
    ours = supervised_contrastive(made, temperature)
    theirs = SupConLoss(temperature=temperature)(made.unit, made.labels)
    assert abs(float(ours) - float(theirs)) < 1e-5 * max(1, abs(float(theirs)))


def test_some_of_those_batches_have_anchors_without_positives() -> None:
    lonely = [int((batch(16, 12, seed).labels.bincount() == 1).sum()) for seed in range(20)]
    assert min(lonely) > 0


def test_supcon_without_any_positive_is_zero_and_still_has_a_gradient() -> None:
    unit = F.normalize(torch.randn(3, 4), dim=1).requires_grad_()
    loss = supervised_contrastive(Batch(unit, torch.tensor([0, 1, 2]), torch.eye(3)), 0.07)
    loss.backward()
    assert float(loss) == 0 and torch.isfinite(unit.grad).all()


def test_supcon_floor_is_the_log_of_the_number_of_positives() -> None:
    made = Batch(F.normalize(torch.ones(33, 4), dim=1), torch.zeros(33, dtype=torch.long), torch.eye(1))
    assert abs(float(supervised_contrastive(made, 0.07)) - torch.log(torch.tensor(32.0))) < 1e-4


def test_fafi_is_the_sum_of_its_four_terms() -> None:
    made = batch(32, 5, 0)
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
    wanted = {
        "cross-entropy": ce,
        "supervised-contrastive": contrast,
        "prototype-feature": ce,
        "prototype-separation": separation,
    }
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
        assert abs(float(values[name]) - float(value)) < 1e-5, name
    assert abs(float(total) - float(sum(wanted.values()))) < 1e-4


def test_weights_scale_terms_and_zero_leaves_them_out() -> None:
    made = batch(32, 5, 0)
    plain, values = evaluate(active(load("fafi").objective), made)
    changed = load(
        "fafi", [("objective.terms.cross-entropy.weight", 3.0), ("objective.terms.prototype-separation.weight", 0.0)]
    )
    total, left = evaluate(active(changed.objective), made)
    assert "prototype-separation" not in left
    assert abs(float(total) - float(plain + 2 * values["cross-entropy"] - values["prototype-separation"])) < 1e-4


def test_temperatures_divide_the_logits() -> None:
    made = batch(32, 5, 0)
    changed = load("fafi", [("objective.terms.prototype-feature.temperature", 0.5)])
    _, values = evaluate(active(changed.objective), made)
    wanted = F.cross_entropy(made.unit @ made.prototypes.T / 0.5, made.labels)
    assert torch.allclose(values["prototype-feature"], wanted)


@pytest.mark.parametrize("temperature", [0.2, 3.0])
def test_each_prototype_term_has_its_own_temperature(temperature: float) -> None:
    made = batch(32, 5, 0)
    z, y, p = made.unit.double(), made.labels, made.prototypes.double()
    features, prototypes = z @ p.T / temperature, p @ p.T / temperature
    wanted = {
        "prototype-feature": -(features - features.logsumexp(1, keepdim=True))[torch.arange(32), y].mean(),
        "prototype-separation": -(prototypes - prototypes.logsumexp(1, keepdim=True)).diagonal().mean(),
    }
    _, plain = evaluate(active(load("fafi").objective), made)
    for name, value in wanted.items():
        changed = load("fafi", [(f"objective.terms.{name}.temperature", temperature)])
        _, values = evaluate(active(changed.objective), made)
        assert abs(float(values[name]) - float(value)) < 1e-5, name
        assert all(torch.equal(values[other], plain[other]) for other in plain if other != name)
