"""Informative IFFI: a client whose feature of x resembles its feature of noise counts less.

w_k(x) = 1 − cos(f_k(x), f_k(ε)), normalised over k for each x; ε a fixed standard-normal image. The rest is IFFI.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from oneround.fusion.base import rules
from oneround.fusion.iffi import Iffi
from oneround.models.inference import ExpertOutput


@rules.register("informative-iffi")
class InformativeIffi(Iffi):
    """Features averaged by their dissimilarity to the client's feature of noise."""

    def weight(self, output: ExpertOutput) -> Tensor:
        return 1 - F.cosine_similarity(output.features, output.expert.noise_feature[None], dim=1)[:, None]
