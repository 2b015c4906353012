"""The objective of a client: a weighted sum of terms over one batch of two views.

FAFI's four terms, with unit features z, labels y, prototypes P:
    CE(z·Pᵀ, y) + SupCon(z, y) + CE(z·Pᵀ/τ, y) + CE(P·Pᵀ/τ, 0…C−1)
SupCon is in contrastive.py. Training may have stages, each with its own weights of the terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.config.parts import Slot, TermPart
from oneround.config.sections import Fraction, NotNegative, Objective, Positive, Stage

TINY = 1e-8


@dataclass(frozen=True)
class Features:
    """Features from outside the batch: of the server's public images, or of the client's own past steps."""

    unit: Tensor
    """(size, features) of length 1"""
    labels: Tensor
    """(size,)"""


@dataclass(frozen=True)
class Batch:
    """Inputs of a term."""

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
    """(size, features) of length 1: samples of the reference distribution"""
    teacher_logits: Tensor | None = None
    """(n, classes) of a teacher on the same views"""
    lengths: Tensor | None = None
    """(n, 1) norms of the encoder's features; only with a linear head"""
    bias: Tensor | None = None
    """(classes,) of a linear head"""

    @property
    def logits(self) -> Tensor:
        """(n, classes) of the network"""
        if self.lengths is None or self.bias is None:
            return self.unit @ self.prototypes.T
        return self.lengths * self.unit @ self.prototypes.T + self.bias


class Term(TermPart):
    """One term of the objective."""

    def loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def floor(self, batch: Batch) -> Tensor | float:
        """The irreducible part of the loss."""
        return 0.0


terms: Slot[Term] = Slot("term", Term)


def log_prior(counts: Tensor) -> Tensor:
    """log of every class's share of a client's samples (classes,); a class without samples gets a very low value."""
    return ((counts.float() + TINY) / counts.sum()).log()


@terms.register("cross-entropy")
class CrossEntropy(Term):
    """CE(z·Pᵀ, y): pulls each feature to its class's prototype."""

    adjust: NotNegative = 0.0
    """Logit adjustment: this factor times the log of the client's own class shares is added to the logits."""

    def loss(self, batch: Batch) -> Tensor:
        logits = batch.logits
        if self.adjust:
            assert batch.prior is not None
            logits = logits + self.adjust * batch.prior
        return F.cross_entropy(logits, batch.labels)


@terms.register("smoothed-cross-entropy")
class SmoothedCrossEntropy(Term):
    """CE of the logits with labels that give every class a small share."""

    smoothing: Fraction = 0.05
    """The share that all classes have together."""

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(batch.logits, batch.labels, label_smoothing=self.smoothing)


@terms.register("prototype-feature")
class PrototypeFeature(Term):
    """CE(z·Pᵀ/τ, y): the prototypes follow their features."""

    temperature: Positive = 1.0

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(batch.unit @ batch.prototypes.T / self.temperature, batch.labels)


@terms.register("prototype-separation")
class PrototypeSeparation(Term):
    """CE(P·Pᵀ/τ, 0…C−1): prototypes repel each other."""

    temperature: Positive = 1.0

    def loss(self, batch: Batch) -> Tensor:
        classes = torch.arange(len(batch.prototypes), device=batch.prototypes.device)
        return F.cross_entropy(batch.prototypes @ batch.prototypes.T / self.temperature, classes)


Weighted = dict[str, tuple[Term, float]]
"""Active terms by name, with their weights."""


def active(objective: Objective, stage: Stage | None = None) -> Weighted:
    """The active terms of a stage, or of a training without stages; a term of weight 0 is not computed."""
    weights = {name: term.weight for name, term in objective.terms.items()}
    if stage and stage.terms is not None:
        weights = stage.terms
    return {name: (terms.of(objective.terms[name]), weight) for name, weight in weights.items() if weight}


def stage_of(objective: Objective, epoch: int, epochs: int) -> int:
    """The index of the stage of an epoch (from 0); every stage has at least one epoch."""
    end, stages = 0, objective.stages
    for number, stage in enumerate(stages[:-1]):
        length = stage.epochs if stage.epochs is not None else round((stage.share or 0) * epochs)
        end = min(end + max(1, length), epochs - (len(stages) - 1 - number))
        if epoch < end:
            return number
    return max(0, len(stages) - 1)


def evaluate(active_terms: Weighted, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted total, and every term's unweighted value."""
    values = {name: term.loss(batch) for name, (term, _) in active_terms.items()}
    return torch.stack([weight * values[name] for name, (_, weight) in active_terms.items()]).sum(), values


def floor(active_terms: Weighted, batch: Batch) -> Tensor:
    """The irreducible part of the total."""
    return batch.unit.new_zeros(()) + sum(weight * term.floor(batch) for term, weight in active_terms.values())
