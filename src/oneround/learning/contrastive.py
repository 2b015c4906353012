"""Supervised contrast: views of one label attract, all others repel (Khosla et al., 2020, the sum over positives outside the log).

    L_i = −mean over positives j of log( e^{s_ij/τ} / (Σ_positives e^{s_il/τ} + Σ_{l ∈ N_i} w_il·e^{s_il/τ}) ),  s = z·zᵀ

N_i are the anchor's negatives: in the batch, in the client's own queue, in the server's bank, or made up. Hard ones may weigh
more: w_il = |N_i|·e^{β s_il} / Σ_{N_i} e^{β s}, without a gradient; β = 0 is plain SupCon.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from oneround.learning.objective import Batch, Features, Term, terms
from oneround.sections import NotNegative, Positive

SameClass = Literal["negatives", "ignored", "positives"]


class More(NamedTuple):
    """Further features an anchor is compared with."""

    features: Features
    same_class: SameClass
    """What those of the anchor's own class are to it."""


class Pairs(NamedTuple):
    """Who is what to whom: anchors (n) against all they are compared with (m)."""

    others: Tensor
    """(m, features)"""
    positive: Tensor
    """(n, m)"""
    negative: Tensor
    """(n, m)"""


@terms.register("supervised-contrastive")
class SupervisedContrastive(Term):
    """Views of one label attract, all others repel; the mean runs over anchors that have a positive."""

    temperature: Positive = 0.07
    beta: NotNegative = 0.0
    """How much more hard negatives weigh; 0: all alike."""
    synthetic: Annotated[int, Field(ge=0, le=64)] = 0
    """Made-up negatives per anchor: its hardest negative mixed evenly with each of the next so many."""
    per_class: bool = False
    """Average over the anchors of each class first, then over the classes that are there."""

    def more(self, batch: Batch) -> list[More]:
        """What anchors are compared with besides the batch."""
        return [] if batch.queue is None else [More(batch.queue, "ignored")]

    def loss(self, batch: Batch) -> Tensor:
        pairs = compared(batch.unit, batch.labels, self.more(batch))
        each = per_anchor(batch.unit, pairs, self.temperature, self.beta, self.synthetic)
        counted = pairs.positive.any(1)
        if not self.per_class:
            return each.sum() / counted.sum().clamp(min=1)
        members = F.one_hot(batch.labels, len(batch.prototypes)) * counted[:, None]
        means = (members.to(each) * each[:, None]).sum(0) / members.sum(0).clamp(min=1)
        return means.sum() / (members.sum(0) > 0).sum().clamp(min=1)

    def floor(self, batch: Batch) -> Tensor:
        """All positives in one point and everything else far away: log of their number, averaged over anchors."""
        same = batch.labels[:, None] == batch.labels
        return (same.sum(1) - 1).clamp(min=1).log().mean()


@terms.register("bank-contrastive")
class BankContrastive(SupervisedContrastive):
    """Supervised contrast in which every anchor is also pushed from the server's public features."""

    needs: ClassVar[str] = "bank"

    same_class: SameClass = "negatives"
    """What bank features of the anchor's own class are: negatives like all (label-blind), nothing, or positives."""

    def more(self, batch: Batch) -> list[More]:
        assert batch.bank is not None
        return [*super().more(batch), More(batch.bank, self.same_class)]


def compared(unit: Tensor, labels: Tensor, more: Sequence[More] = ()) -> Pairs:
    """Every anchor against the batch and more; unit (n, features), labels (n,)."""
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    same = labels[:, None] == labels
    positive, negative = [same & ~itself], [~same]
    for features, same_class in more:
        there = (features.labels >= 0)[None]  # a queue begins empty
        same = labels[:, None] == features.labels
        positive.append(same & there & (same_class == "positives"))
        negative.append((~same | (same_class == "negatives")) & there)
    others = torch.cat([unit, *(each.features.unit for each in more)])
    return Pairs(others, torch.cat(positive, 1), torch.cat(negative, 1))


def per_anchor(unit: Tensor, pairs: Pairs, temperature: float, beta: float = 0.0, synthetic: int = 0) -> Tensor:
    """L_i of every anchor (n,); 0 for one without a positive."""
    cosine = unit @ pairs.others.T
    similarity = cosine / temperature
    weighed = similarity
    if beta:
        weighed = similarity + _log_weights(cosine.detach(), pairs.negative, beta)
    columns = [weighed.masked_fill(~(pairs.positive | pairs.negative), -torch.inf)]
    if synthetic:
        columns.append(_mixes(unit, cosine.detach(), pairs, synthetic) / temperature)
    total = torch.cat(columns, 1).logsumexp(1, keepdim=True)
    log_probability = (similarity - total).masked_fill(~pairs.positive, 0)
    return -log_probability.sum(1) / pairs.positive.sum(1).clamp(min=1)


def _log_weights(cosine: Tensor, negative: Tensor, beta: float) -> Tensor:
    """log w (n, m), 0 for what is no negative."""
    pull = (beta * cosine).masked_fill(~negative, -torch.inf)
    count = negative.sum(1, keepdim=True)
    log_weight = count.clamp(min=1).log() + pull - pull.logsumexp(1, keepdim=True)
    return torch.where(negative, log_weight, torch.zeros_like(cosine))


def _mixes(unit: Tensor, cosine: Tensor, pairs: Pairs, synthetic: int) -> Tensor:
    """Cosines (n, ≤ synthetic) to made-up negatives; −∞ where an anchor has too few real ones. No gradient through them."""
    hardest = cosine.masked_fill(~pairs.negative, -torch.inf).topk(min(synthetic + 1, cosine.shape[1]), dim=1)
    chosen = pairs.others.detach()[hardest.indices]
    mixed = F.normalize(chosen[:, :1] + chosen[:, 1:], dim=2)
    return (unit[:, None] * mixed).sum(2).masked_fill(hardest.values[:, 1:] == -torch.inf, -torch.inf)
