"""IFFI, the inference of FAFI: average the clients' features and compare them with the mean prototypes.

F(x) = Σ_k w_k f_k(x), w_k = n_k / Σ n;  class = argmax F(x)/‖F(x)‖ · P̄ᵀ with P̄ = mean_k P_k.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.fusion.base import EnsembleRule, rules
from oneround.models.inference import ExpertOutput, Totals, plus


@rules.register("iffi")
class Iffi(EnsembleRule):
    """Features averaged by sample count, against the mean of the prototypes."""

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals:
        return add_features(totals, output, output.expert.samples[None, None])

    def scores(self, totals: Totals) -> Tensor:
        return against_mean_prototypes(totals)


def add_features(totals: Totals | None, output: ExpertOutput, weight: Tensor) -> Totals:
    """Add one client's features, weighted, and its prototypes to the totals."""
    one = torch.ones((), device=weight.device)
    return plus(
        totals, features=weight * output.features, weight=weight, prototypes=output.expert.net.prototypes, clients=one
    )


def against_mean_prototypes(totals: Totals) -> Tensor:
    """Cosine-like scores of the fused features against the mean prototypes."""
    fused = F.normalize(totals["features"] / totals["weight"].clamp(min=1e-12), dim=1)
    return fused @ (totals["prototypes"] / totals["clients"]).T
