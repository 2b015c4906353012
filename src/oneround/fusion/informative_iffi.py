"""Informative IFFI: a client whose feature of x resembles its feature of noise counts less.

w_k(x) = 1 − cos(f_k(x), f_k(ε)), normalised over k for each x; ε a fixed standard-normal image. The rest is IFFI.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from oneround.fusion.base import EnsembleRule, rules
from oneround.fusion.iffi import add_features, against_mean_prototypes
from oneround.models.inference import ExpertOutput, Totals


@rules.register("informative-iffi")
class InformativeIffi(EnsembleRule):
    """Features averaged by their dissimilarity to the client's feature of noise."""

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals:
        weight = 1 - F.cosine_similarity(output.features, output.expert.noise_feature[None], dim=1)
        return add_features(totals, output, weight[:, None])

    def scores(self, totals: Totals) -> Tensor:
        return against_mean_prototypes(totals)
