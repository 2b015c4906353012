"""IFFI, the inference of FAFI: fuse the clients' features, compare them with the mean prototypes.

Plain:       F(x) = Σ_k w_k f_k(x), w_k = n_k / Σ n
Informative: w_k(x) = 1 − cos(f_k(x), f_k(ε)), normalised over k for each x; ε a fixed standard-normal image: a client
             whose feature looks like its answer to noise has little to say about x.
Class = argmax F(x)/‖F(x)‖ · P̄ᵀ with P̄ = mean_k P_k.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.fusion.rule import EnsembleRule, rules
from oneround.models.inference import Seen, Totals, plus


@rules.register("iffi")
class Iffi(EnsembleRule):
    """Features averaged by sample count, against the mean of the prototypes."""

    def add(self, totals: Totals | None, seen: Seen) -> Totals:
        return _fold(totals, seen, seen.expert.samples[None, None])

    def scores(self, totals: Totals) -> Tensor:
        return _against_mean_prototypes(totals)


@rules.register("informative-iffi")
class InformativeIffi(EnsembleRule):
    """Features averaged by how unlike the client's answer to noise they are."""

    def add(self, totals: Totals | None, seen: Seen) -> Totals:
        weight = 1 - F.cosine_similarity(seen.features, seen.expert.noise_feature[None], dim=1)
        return _fold(totals, seen, weight[:, None])

    def scores(self, totals: Totals) -> Tensor:
        return _against_mean_prototypes(totals)


def _fold(totals: Totals | None, seen: Seen, weight: Tensor) -> Totals:
    one = torch.ones((), device=weight.device)
    return plus(
        totals, features=weight * seen.features, weight=weight, prototypes=seen.expert.net.prototypes, clients=one
    )


def _against_mean_prototypes(totals: Totals) -> Tensor:
    fused = F.normalize(totals["features"] / totals["weight"].clamp(min=1e-12), dim=1)
    return fused @ (totals["prototypes"] / totals["clients"]).T
