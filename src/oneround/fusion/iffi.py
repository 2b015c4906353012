"""IFFI, the inference of FAFI (Zeng et al., 2025): average the clients' features and compare them with the mean prototypes.

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

    def weight(self, output: ExpertOutput) -> Tensor:
        """w_k before normalisation, (n, 1) or (1, 1)."""
        return output.expert.samples[None, None]

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals:
        weight, expert = self.weight(output), output.expert
        return plus(
            totals,
            features=weight * output.features,
            weight=weight,
            prototypes=expert.net.prototypes,
            clients=torch.ones_like(expert.samples),
        )

    def scores(self, totals: Totals) -> Tensor:
        fused = F.normalize(totals["features"] / totals["weight"].clamp(min=1e-12), dim=1)
        return fused @ (totals["prototypes"] / totals["clients"]).T
