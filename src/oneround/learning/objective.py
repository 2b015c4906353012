"""What a client minimises: a weighted sum of terms over one batch of two views.

FAFI's four terms, with unit features z, labels y, prototypes P:
    CE(z·Pᵀ, y) + SupCon(z, y) + CE(z·Pᵀ/τ, y) + CE(P·Pᵀ/τ, 0…C−1)
SupCon is in contrastive.py. Training may go through stages, each with its own weights of the terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.parts import Part, Slot
from oneround.sections import NotNegative, Objective, Positive, Stage


@dataclass(frozen=True)
class Features:
    """Features that are not of the batch: of the server's public images, or of the client's own past steps."""

    unit: Tensor
    """(size, features) of length 1"""
    labels: Tensor
    """(size,)"""


@dataclass(frozen=True)
class Batch:
    """What a term may look at."""

    unit: Tensor
    """(n, features) features of length 1; all first views, then all second views if there are two"""
    labels: Tensor
    """(n,)"""
    prototypes: Tensor
    """(classes, features)"""
    prior: Tensor | None = None
    """(classes,) log of every class's share of the client's samples"""
    bank: Features | None = None
    queue: Features | None = None
    reference: Tensor | None = None
    """(size, features) of length 1: a distribution to resemble"""
    answers: Tensor | None = None
    """(n, classes) a teacher's scores of the same views"""
    lengths: Tensor | None = None
    """(n, 1) of the features as they leave the encoder; only of a network with a linear head"""
    bias: Tensor | None = None
    """(classes,) of a linear head"""

    @property
    def logits(self) -> Tensor:
        """(n, classes) the network's answer"""
        if self.lengths is None or self.bias is None:
            return self.unit @ self.prototypes.T
        return self.lengths * self.unit @ self.prototypes.T + self.bias


class Term(Part):
    """One term of the objective."""

    needs: ClassVar[str] = ""
    """What must be there for it: a section of the recipe (`bank`, `reference`), or a `teacher`."""

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

    adjust: NotNegative = 0.0
    """Logit adjustment: so many times the log of the client's own class shares is added to the logits."""

    def loss(self, batch: Batch) -> Tensor:
        logits = batch.logits
        if self.adjust:
            assert batch.prior is not None
            logits = logits + self.adjust * batch.prior
        return F.cross_entropy(logits, batch.labels)


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
