"""What a client minimises: a weighted sum of terms over one batch of two views.

FAFI's four terms, with unit features z, labels y, prototypes P:
    CE(z·Pᵀ, y) + SupCon(z, y) + CE(z·Pᵀ/τ, y) + CE(P·Pᵀ/τ, 0…C−1)
SupCon: Khosla et al., 2020 (the sum over positives outside the logarithm).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.parts import Part, Slot
from oneround.recipe import NotNegative, Objective, Positive


@dataclass(frozen=True)
class Batch:
    """What a term may look at."""

    unit: Tensor
    """(n, features) features of length 1; all first views, then all second views"""
    labels: Tensor
    """(n,)"""
    prototypes: Tensor
    """(classes, features)"""


class Term(Part):
    """One term of the objective."""

    weight: NotNegative = 1.0

    def loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError


terms: Slot[Term] = Slot("term", Term)


@terms.register("cross-entropy")
class CrossEntropy(Term):
    """CE(z·Pᵀ, y): each feature near its class's prototype."""

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(batch.unit @ batch.prototypes.T, batch.labels)


@terms.register("supervised-contrastive")
class SupervisedContrastive(Term):
    """Views of one label attract, all others repel; the mean runs over anchors that have a positive."""

    temperature: Positive = 0.07

    def loss(self, batch: Batch) -> Tensor:
        return supervised_contrastive(batch.unit, batch.labels, self.temperature)


@terms.register("prototype-feature")
class PrototypeFeature(Term):
    """CE(z·Pᵀ/τ, y): the prototypes follow their features."""

    temperature: Positive = 1.0

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(batch.unit @ batch.prototypes.T / self.temperature, batch.labels)


@terms.register("prototype-separation")
class PrototypeSeparation(Term):
    """CE(P·Pᵀ/τ, 0…C−1): prototypes keep away from each other."""

    temperature: Positive = 1.0

    def loss(self, batch: Batch) -> Tensor:
        own = torch.arange(len(batch.prototypes), device=batch.prototypes.device)
        return F.cross_entropy(batch.prototypes @ batch.prototypes.T / self.temperature, own)


def supervised_contrastive(unit: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """−mean over anchors i of mean over positives j of log(e^{s_ij} / Σ_{l≠i} e^{s_il}), s = z·zᵀ/τ; 0 if no anchor has a positive.

    unit (n, features), labels (n,)
    """
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    similarity = (unit @ unit.T / temperature).masked_fill(itself, -torch.inf)
    log_probability = (similarity - similarity.logsumexp(1, keepdim=True)).masked_fill(itself, 0)
    positive = (labels[:, None] == labels) & ~itself
    positives = positive.sum(1)
    per_anchor = (log_probability * positive).sum(1) / positives.clamp(min=1)
    return -per_anchor.sum() / (positives > 0).sum().clamp(min=1)


def active(objective: Objective) -> dict[str, Term]:
    """The terms that count; one of weight 0 is not computed."""
    every = {name: terms.of(part) for name, part in objective.terms.items()}
    return {name: term for name, term in every.items() if term.weight}


def evaluate(objective: Objective, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The total and every active term's own value before its weight."""
    chosen = active(objective)
    values = {name: term.loss(batch) for name, term in chosen.items()}
    return torch.stack([term.weight * values[name] for name, term in chosen.items()]).sum(), values
