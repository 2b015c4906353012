"""IFFI in a common feature space: clients' features are turned or reordered until their prototypes agree.

Clients that trained apart name the same thing by other feature units. R_k maps client k's features onto the first client's, by
the prototypes of classes both hold: an assignment of units (`match`), or a rotation (`procrustes`). Then, as in IFFI,
    F(x) = Σ_k w_k R_k f_k(x), P̄ = mean_k R_k P_k.
"""

from __future__ import annotations

from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

from oneround.fusion.rule import EnsembleRule, rules
from oneround.models.inference import Seen, Totals, plus


@rules.register("aligned-iffi")
class AlignedIffi(EnsembleRule):
    """Features averaged after they were brought into the first client's space, against the mean of prototypes there."""

    by: Literal["match", "procrustes"] = "procrustes"

    def add(self, totals: Totals | None, seen: Seen) -> Totals:
        expert = seen.expert
        prototypes, held = expert.net.prototypes.detach(), (expert.class_counts > 0).to(seen.features)
        goal = {"goal": prototypes, "held": held}
        turn = torch.eye(prototypes.shape[1]).to(prototypes)
        if totals is not None:
            goal = {name: totals[name] for name in goal}
            both = (goal["held"] * held)[:, None]
            turn = (matching if self.by == "match" else rotation)(both * prototypes, both * goal["goal"])
        folded = plus(
            {name: total for name, total in totals.items() if name not in goal} if totals else None,
            features=expert.samples * seen.features @ turn, weight=expert.samples,
            prototypes=prototypes @ turn, clients=torch.ones_like(expert.samples),
        )  # fmt: skip
        return {**folded, **goal}

    def scores(self, totals: Totals) -> Tensor:
        return F.normalize(totals["features"] / totals["weight"], dim=1) @ (totals["prototypes"] / totals["clients"]).T


def rotation(source: Tensor, goal: Tensor) -> Tensor:
    """The orthogonal R (d, d) that brings source·R nearest to goal (orthogonal Procrustes); both (n, d).

    Directions that neither uses stay as they are as far as they can.
    """
    left, _, right = torch.linalg.svd(
        source.double().T @ goal.double() + 1e-6 * torch.eye(source.shape[1]).to(source).double()
    )
    turn: Tensor = left @ right
    return turn.to(source)


def matching(source: Tensor, goal: Tensor) -> Tensor:
    """The permutation R (d, d) of units that brings source·R nearest to goal; both (n, d)."""
    gain = (source.double().T @ goal.double() + 1e-9 * torch.eye(source.shape[1]).to(source).double()).cpu().numpy()
    rows, columns = linear_sum_assignment(-gain)
    turn = torch.zeros(source.shape[1], source.shape[1])
    turn[rows, columns] = 1
    return turn.to(source)
