"""One feature space for all: clients' features are turned or reordered until their prototypes agree, then averaged as in IFFI.

Clients that trained apart name the same thing by other feature units. R_k maps client k's features onto those of the client with
the most samples, by the prototypes of classes both hold: an assignment of units (`match`), or a rotation (`procrustes`):
    F(x) = Σ_k w_k R_k f_k(x), P̄ = mean_k R_k P_k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from oneround.fusion.iffi import Iffi
from oneround.fusion.rule import Rule, UploadExperts, rules
from oneround.models import Ensemble, Expert, Inference
from oneround.models.inference import Experts
from oneround.protocol import Broadcast, Upload
from oneround.recipe import Federated
from oneround.site import Site

Way = Literal["match", "procrustes"]


@rules.register("aligned-iffi")
class AlignedIffi(Rule):
    """Features averaged in one client's space, into which the others' are brought, against the mean of prototypes there."""

    by: Way = "procrustes"

    @property
    def needs_counts(self) -> bool:
        return True

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        return Ensemble(Iffi(), Turned(UploadExperts(uploads, broadcast, server.device), uploads, self.by))

    def restore(
        self, shards: Sequence[dict[str, Tensor]], recipe: Federated, channels: int, classes: int, streamed: bool
    ) -> Inference:
        return Iffi().restore(shards, recipe, channels, classes, streamed)


class Turned:
    """Experts brought into the space of the one with the most samples (the first by name of equals)."""

    def __init__(self, experts: Experts, uploads: Sequence[Upload], by: Way) -> None:
        self.experts, self.by = experts, by
        most = min(((-upload.samples, upload.client, number) for number, upload in enumerate(uploads)))[2]
        chosen = uploads[most]
        self.goal, self.held = chosen.weights["prototypes"], chosen.class_counts > 0

    def __len__(self) -> int:
        return len(self.experts)

    def __iter__(self) -> Iterator[Expert]:
        for expert in self.experts:
            prototypes = expert.net.prototypes.detach()
            both = (self.held.to(prototypes) * (expert.class_counts > 0))[:, None]
            turn = (matching if self.by == "match" else rotation)(both * prototypes, both * self.goal.to(prototypes))
            expert.net.prototypes = torch.nn.Parameter(prototypes @ turn, requires_grad=False)
            expert.register_buffer("statistic_turn", turn)
            expert.noise_feature.copy_(expert.noise_feature @ turn)
            yield expert


def rotation(source: Tensor, goal: Tensor) -> Tensor:
    """The orthogonal R (d, d) that brings source·R nearest to goal (orthogonal Procrustes); both (n, d).

    Directions that neither uses stay as they are as far as they can.
    """
    identity = torch.eye(source.shape[1], dtype=torch.float64, device=source.device)
    left, _, right = torch.linalg.svd(source.double().T @ goal.double() + 1e-6 * identity)
    turn: Tensor = left @ right
    return turn.to(source)


def matching(source: Tensor, goal: Tensor) -> Tensor:
    """The permutation R (d, d) of units that brings source·R nearest to goal; both (n, d)."""
    from scipy.optimize import linear_sum_assignment  # a third of a second, and every worker of a crew would pay it

    identity = torch.eye(source.shape[1], dtype=torch.float64, device=source.device)
    rows, columns = linear_sum_assignment(-(source.double().T @ goal.double() + 1e-9 * identity).cpu().numpy())
    turn = torch.zeros(source.shape[1], source.shape[1])
    turn[rows, columns] = 1
    return turn.to(source)
