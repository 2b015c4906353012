"""Aligned IFFI: clients' feature spaces are rotated or permuted until their prototypes agree, then averaged as in IFFI.

Clients that trained separately use different feature units for the same thing. R_k maps client k's features onto those of the
client with the most samples, by the prototypes of classes both hold: a permutation of units (`match`), or a rotation
(`procrustes`):
    F(x) = Σ_k w_k R_k f_k(x), P̄ = mean_k R_k P_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from oneround.config.parts import Needs
from oneround.fusion.base import LazyExperts, Rule, SavedModel, UploadExperts, rules
from oneround.fusion.iffi import Iffi
from oneround.models.inference import Ensemble, Expert, Experts, Inference
from oneround.protocol import Broadcast, Upload
from oneround.site import Site

Method = Literal["match", "procrustes"]


@rules.register("aligned-iffi")
class AlignedIffi(Rule):
    """Features averaged in one client's feature space after alignment, against the mean of the aligned prototypes."""

    by: Method = "procrustes"

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(class_counts=True)

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        experts = UploadExperts(uploads, broadcast, server.device)
        return Ensemble(Iffi(), aligned(experts, uploads, self.by))

    def restore(self, saved: SavedModel) -> Inference:
        return Iffi().restore(saved)


def aligned(experts: Experts, uploads: Sequence[Upload], by: Method) -> LazyExperts[Expert]:
    """Experts transformed into the feature space of the one with the most samples (ties: first by name)."""
    reference = min(uploads, key=lambda upload: (-upload.samples, upload.client))
    target, target_classes = reference.weights["prototypes"], reference.class_counts > 0

    def transformed(expert: Expert) -> Expert:
        prototypes = expert.net.prototypes.detach()
        shared = (target_classes.to(prototypes) * (expert.class_counts > 0))[:, None]
        transform = (matching if by == "match" else rotation)(shared * prototypes, shared * target.to(prototypes))
        expert.net.prototypes = torch.nn.Parameter(prototypes @ transform, requires_grad=False)
        expert.register_buffer("statistic_turn", transform)
        expert.noise_feature.copy_(expert.noise_feature @ transform)
        return expert

    return LazyExperts(experts, transformed)


def rotation(source: Tensor, target: Tensor) -> Tensor:
    """The orthogonal R (d, d) that brings source·R nearest to the target (orthogonal Procrustes); both (n, d).

    Directions that neither uses change as little as possible.
    """
    identity = torch.eye(source.shape[1], dtype=torch.float64, device=source.device)
    left, _, right = torch.linalg.svd(source.double().T @ target.double() + 1e-6 * identity)
    transform: Tensor = left @ right
    return transform.to(source)


def matching(source: Tensor, target: Tensor) -> Tensor:
    """The permutation R (d, d) of units that brings source·R nearest to the target; both (n, d)."""
    from scipy.optimize import linear_sum_assignment  # imported late: it takes a third of a second, in every worker

    identity = torch.eye(source.shape[1], dtype=torch.float64, device=source.device)
    rows, columns = linear_sum_assignment(-(source.double().T @ target.double() + 1e-9 * identity).cpu().numpy())
    permutation = torch.zeros(source.shape[1], source.shape[1])
    permutation[rows, columns] = 1
    return permutation.to(source)
