"""Supervised contrastive loss: views of one label attract, all others repel (Khosla et al., 2020, L_out).

    L_i = −mean over positives j of log( e^{s_ij/τ} / (Σ_positives e^{s_il/τ} + Σ_{l ∈ N_i} w_il·e^{s_il/τ}) ),  s = z·zᵀ

N_i are the anchor's negatives: from the batch, the client's own queue, the server's bank, or synthetic. Hard negatives may weigh
more: w_il = |N_i|·e^{β s_il} / Σ_{N_i} e^{β s}, detached; β = 0 is plain SupCon.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from oneround import kernels
from oneround.config.parts import Needs
from oneround.config.sections import NotNegative, Positive
from oneround.training.objective import Batch, Features, Term, terms

SameClass = Literal["negatives", "ignored", "positives"]


class OtherFeatures(NamedTuple):
    """Features from outside the batch that anchors are compared with."""

    features: Features
    same_class: SameClass
    """Role of those of the anchor's own class."""


class Pairs(NamedTuple):
    """Positive and negative pairs: anchors (n) against all features they are compared with (m)."""

    others: Tensor
    """(m, features)"""
    positive: Tensor
    """(n, m)"""
    negative: Tensor
    """(n, m)"""


@terms.register("supervised-contrastive")
class SupervisedContrastive(Term):
    """Views of one label attract, all others repel; the mean runs over anchors that have a positive."""

    uses_queue: ClassVar[bool] = True

    temperature: Positive = 0.07
    beta: NotNegative = 0.0
    """Emphasis on hard negatives; 0: equal weights."""
    synthetic: Annotated[int, Field(ge=0, le=64)] = 0
    """Synthetic negatives per anchor: its hardest negative mixed evenly with each of the next hardest."""
    per_class: bool = False
    """Average over the anchors of each class first, then over the classes present."""

    def other_features(self, batch: Batch) -> list[OtherFeatures]:
        """Features that anchors are compared with besides the batch."""
        return [] if batch.queue is None else [OtherFeatures(batch.queue, "ignored")]

    def loss(self, batch: Batch) -> Tensor:
        others = self.other_features(batch)
        if kernels.usable(batch.unit) and not (others or self.beta or self.synthetic or self.per_class):
            from oneround.kernels import contrastive as kernel

            if len(batch.unit) <= kernel.MOST_ANCHORS:
                return kernel.supervised_contrastive(batch.unit, batch.labels, self.temperature)
        pairs = pairs_of(batch.unit, batch.labels, others)
        each = per_anchor(batch.unit, pairs, self.temperature, self.beta, self.synthetic)
        counted = pairs.positive.any(1)
        if not self.per_class:
            return each.sum() / counted.sum().clamp(min=1)
        members = F.one_hot(batch.labels, len(batch.prototypes)) * counted[:, None]
        means = (members.to(each) * each[:, None]).sum(0) / members.sum(0).clamp(min=1)
        return means.sum() / (members.sum(0) > 0).sum().clamp(min=1)

    def floor(self, batch: Batch) -> Tensor:
        """The loss with all positives at one point and all negatives far away: the mean log of the number of positives."""
        same = batch.labels[:, None] == batch.labels
        return (same.sum(1) - 1).clamp(min=1).log().mean()


@terms.register("bank-contrastive")
class BankContrastive(SupervisedContrastive):
    """Supervised contrastive loss with the server's public features as further negatives."""

    same_class: SameClass = "negatives"
    """Role of bank features of the anchor's own class: negatives (label-blind), ignored, or positives."""

    @property
    def needs(self) -> Needs:
        return Needs(bank=True)

    def other_features(self, batch: Batch) -> list[OtherFeatures]:
        assert batch.bank is not None
        return [*super().other_features(batch), OtherFeatures(batch.bank, self.same_class)]


def pairs_of(unit: Tensor, labels: Tensor, other_features: list[OtherFeatures]) -> Pairs:
    """Every anchor against the batch and other features; unit (n, features), labels (n,)."""
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    same = labels[:, None] == labels
    positive, negative = [same & ~itself], [~same]
    for features, same_class in other_features:
        filled = (features.labels >= 0)[None]  # a queue starts empty
        same = labels[:, None] == features.labels
        positive.append(same & filled & (same_class == "positives"))
        negative.append((~same | (same_class == "negatives")) & filled)
    others = torch.cat([unit, *(each.features.unit for each in other_features)])
    return Pairs(others, torch.cat(positive, 1), torch.cat(negative, 1))


def per_anchor(unit: Tensor, pairs: Pairs, temperature: float, beta: float, synthetic: int) -> Tensor:
    """L_i of every anchor (n,); 0 for one without a positive."""
    cosine = unit @ pairs.others.T
    similarity = cosine / temperature
    weighted = similarity + _log_weights(cosine.detach(), pairs.negative, beta) if beta else similarity
    columns = [weighted.masked_fill(~(pairs.positive | pairs.negative), -torch.inf)]
    if synthetic:
        columns.append(_mixes(unit, cosine.detach(), pairs, synthetic) / temperature)
    total = torch.cat(columns, 1).logsumexp(1, keepdim=True)
    log_probability = (similarity - total).masked_fill(~pairs.positive, 0)
    return -log_probability.sum(1) / pairs.positive.sum(1).clamp(min=1)


def _log_weights(cosine: Tensor, negative: Tensor, beta: float) -> Tensor:
    """log w (n, m); 0 except for negatives."""
    emphasis = (beta * cosine).masked_fill(~negative, -torch.inf)
    count = negative.sum(1, keepdim=True)
    log_weight = count.clamp(min=1).log() + emphasis - emphasis.logsumexp(1, keepdim=True)
    return torch.where(negative, log_weight, torch.zeros_like(cosine))


def _mixes(unit: Tensor, cosine: Tensor, pairs: Pairs, synthetic: int) -> Tensor:
    """Cosines (n, ≤ synthetic) to synthetic negatives, which are detached; −∞ where an anchor has too few real ones."""
    hardest = cosine.masked_fill(~pairs.negative, -torch.inf).topk(min(synthetic + 1, cosine.shape[1]), dim=1)
    chosen = pairs.others.detach()[hardest.indices]
    mixed = F.normalize(chosen[:, :1] + chosen[:, 1:], dim=2)
    return (unit[:, None] * mixed).sum(2).masked_fill(hardest.values[:, 1:] == -torch.inf, -torch.inf)
