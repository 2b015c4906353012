"""Gradient conflicts: every term's gradient at the features and at the prototypes, and the cosines between terms.

Computed from time to time on the features of the last step, so the encoder is not run again. Two terms whose gradients have a
negative cosine work against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.training.objective import Batch, Weighted

TENSORS = ("features", "prototypes")


def gradients(active_terms: Weighted, batch: Batch, align: Callable[[Batch], Tensor] | None) -> dict[str, Any]:
    """Norm of every term's gradient (before its weight) and cosines between terms, at features z and prototypes P.

    `base` is the weighted sum of the terms. A cosine with a gradient that vanishes (a contrastive term does not touch P) is None.
    """
    points = (batch.unit.detach().requires_grad_(), batch.prototypes.detach().requires_grad_())
    detached = replace(batch, unit=points[0], prototypes=points[1])
    losses = {name: term.loss(detached) for name, (term, _) in active_terms.items()}
    pairs = list(combinations(sorted(active_terms), 2))
    if align is not None:
        losses["alignment"] = align(detached)
        pairs.append(("base", "alignment"))
    by_term = {
        name: torch.autograd.grad(loss, points, allow_unused=True, materialize_grads=True)
        for name, loss in losses.items()
    }
    measured = []
    for at in range(len(TENSORS)):
        gradient = {name: both[at].flatten() for name, both in by_term.items()}
        gradient["base"] = torch.stack([weight * gradient[name] for name, (_, weight) in active_terms.items()]).sum(0)
        cosines = [F.cosine_similarity(gradient[one], gradient[other], dim=0) for one, other in pairs]
        measured.append(torch.stack([*(each.norm() for each in gradient.values()), *cosines]))
    traces: dict[str, Any] = {}
    names = [*losses, "base"]
    for tensor, values in zip(TENSORS, torch.stack(measured).tolist(), strict=True):  # read back at once
        norm = dict(zip(names, values, strict=False))
        cosine = {
            f"{one} · {other}": value if norm[one] and norm[other] else None
            for (one, other), value in zip(pairs, values[len(names) :], strict=True)
        }
        traces[tensor] = {"norm": norm, "cosine": cosine}
    return traces


def anchoring(prototypes: Tensor, anchors: Tensor) -> Tensor:
    """(2, …): mean cosine of the prototypes (…, classes, features) to their anchors, and their mean length."""
    cosine = F.cosine_similarity(prototypes, anchors, dim=-1)
    return torch.stack([cosine.mean(-1), prototypes.norm(dim=-1).mean(-1)])


ANCHORING = ("anchor_cosine", "prototype_norm")
"""Metrics that `anchoring` measures at the end of an epoch."""


def spread(unit: Tensor) -> Tensor:
    """1 − ‖mean of unit features‖²: 0 when all features are one point. unit (n, features)"""
    return 1 - unit.mean(0).square().sum()
