"""What a client minimises: a weighted sum of terms over one batch of two views.

FAFI's four terms, with unit features z, labels y, prototypes P:
    CE(z·Pᵀ, y) + SupCon(z, y) + CE(z·Pᵀ/τ, y) + CE(P·Pᵀ/τ, 0…C−1)
SupCon: Khosla et al., 2020 (the sum over positives outside the logarithm).
Training may go through stages, each with its own weights of the terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.parts import Part, Slot
from oneround.recipe import NotNegative, Objective, Positive, Stage


@dataclass(frozen=True)
class BankFeatures:
    """What the server sent of its public images."""

    unit: Tensor
    """(size, features) of length 1"""
    labels: Tensor
    """(size,)"""


@dataclass(frozen=True)
class Batch:
    """What a term may look at."""

    unit: Tensor
    """(n, features) features of length 1; all first views, then all second views"""
    labels: Tensor
    """(n,)"""
    prototypes: Tensor
    """(classes, features)"""
    bank: BankFeatures | None = None


class Term(Part):
    """One term of the objective."""

    needs_bank: ClassVar[bool] = False

    weight: NotNegative = 1.0

    def loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def floor(self, batch: Batch) -> Tensor | float:
        """What of the loss no training can remove."""
        return 0.0


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

    def floor(self, batch: Batch) -> Tensor:
        """All positives in one point and everything else far away: log of their number, averaged over anchors."""
        same = batch.labels[:, None] == batch.labels
        return (same.sum(1) - 1).clamp(min=1).log().mean()


@terms.register("bank-contrastive")
class BankContrastive(SupervisedContrastive):
    """Supervised contrast in which every anchor is also pushed from the server's public features."""

    needs_bank: ClassVar[bool] = True

    same_class: Literal["negatives", "ignored", "positives"] = "negatives"
    """What bank features of the anchor's own class are: negatives like all (label-blind), nothing, or positives."""

    def loss(self, batch: Batch) -> Tensor:
        assert batch.bank is not None
        return supervised_contrastive(batch.unit, batch.labels, self.temperature, batch.bank, self.same_class)


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


def supervised_contrastive(
    unit: Tensor, labels: Tensor, temperature: float, bank: BankFeatures | None = None, same_class: str = "negatives"
) -> Tensor:
    """−mean over anchors i of mean over positives j of log(e^{s_ij} / Σ_{l≠i} e^{s_il}), s = z·zᵀ/τ; 0 if no anchor has a positive.

    unit (n, features), labels (n,); the bank's features are more columns l, and more positives j if they are to be.
    """
    left_out = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    positive = (labels[:, None] == labels) & ~left_out
    others = unit
    if bank is not None:
        same = labels[:, None] == bank.labels
        others = torch.cat([unit, bank.unit])
        left_out = torch.cat([left_out, same & (same_class == "ignored")], 1)
        positive = torch.cat([positive, same & (same_class == "positives")], 1)
    similarity = (unit @ others.T / temperature).masked_fill(left_out, -torch.inf)
    log_probability = (similarity - similarity.logsumexp(1, keepdim=True)).masked_fill(left_out, 0)
    positives = positive.sum(1)
    per_anchor = (log_probability * positive).sum(1) / positives.clamp(min=1)
    return -per_anchor.sum() / (positives > 0).sum().clamp(min=1)


Weighted = dict[str, tuple[Term, float]]
"""Terms that count, by name, with their weights."""


def active(objective: Objective, stage: Stage | None = None) -> Weighted:
    """The terms that count in a stage (in all of them: without one); one of weight 0 is not computed."""
    every = {name: terms.of(part) for name, part in objective.terms.items()}
    chosen = stage.terms if stage and stage.terms is not None else {name: term.weight for name, term in every.items()}
    return {name: (every[name], weight) for name, weight in chosen.items() if weight}


def stage_of(objective: Objective, epoch: int, epochs: int) -> int:
    """Which stage an epoch (from 0) of so many belongs to; every stage has at least one."""
    end, stages = 0, objective.stages
    for number, stage in enumerate(stages[:-1]):
        length = stage.epochs if stage.epochs is not None else round((stage.share or 0) * epochs)
        end = min(end + max(1, length), epochs - (len(stages) - 1 - number))
        if epoch < end:
            return number
    return max(0, len(stages) - 1)


def evaluate(chosen: Weighted, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The total and every term's own value before its weight."""
    values = {name: term.loss(batch) for name, (term, _) in chosen.items()}
    return torch.stack([weight * values[name] for name, (_, weight) in chosen.items()]).sum(), values


def floor(chosen: Weighted, batch: Batch) -> Tensor:
    """What of the total no training can remove."""
    return batch.unit.new_zeros(()) + sum(weight * term.floor(batch) for term, weight in chosen.values())
