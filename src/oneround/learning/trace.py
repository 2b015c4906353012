"""Who pulls where: the gradient of every term at the features and at the prototypes, and the angles between them.

Taken once in a while on features that a step left behind, so the encoder is not run again. Two terms whose gradients have a
negative cosine undo each other's work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.learning.objective import Batch, Weighted

PLACES = ("features", "prototypes")


def gradients(chosen: Weighted, batch: Batch, align: Callable[[Batch], Tensor] | None) -> dict[str, Any]:
    """Norm of every term's gradient (before its weight) and cosines between terms, at features z and prototypes P.

    `base` is the weighted sum of the terms. A cosine with a gradient that vanishes (a contrastive term does not touch P) is None.
    """
    unit = batch.unit.detach().requires_grad_()
    prototypes = batch.prototypes.detach().requires_grad_()
    there = replace(batch, unit=unit, prototypes=prototypes)
    losses: dict[str, Tensor] = {name: term.loss(there) for name, (term, _) in chosen.items()}
    if align is not None:
        losses["alignment"] = align(there)
    pulls = {
        name: torch.autograd.grad(loss, (unit, prototypes), allow_unused=True, materialize_grads=True)
        for name, loss in losses.items()
    }
    base = [torch.stack([weight * pulls[name][at] for name, (_, weight) in chosen.items()]).sum(0) for at in range(2)]
    pairs = [*combinations(sorted(chosen), 2), *([("base", "alignment")] if align is not None else [])]
    every = {**pulls, "base": tuple(base)}
    norms = torch.stack([pull[place].norm() for place in range(2) for pull in every.values()])
    cosines = [
        F.cosine_similarity(every[one][place].flatten(), every[other][place].flatten(), dim=0)
        for place in range(2)
        for one, other in pairs
    ]
    measured = torch.cat([norms, torch.stack(cosines)] if cosines else [norms]).tolist()  # read back at once
    told: dict[str, Any] = {}
    for place, where in enumerate(PLACES):
        size = dict(zip(every, measured[place * len(every) :], strict=False))
        found = measured[2 * len(every) + place * len(pairs) :]
        told[where] = {
            "norm": size,
            "cosine": {
                f"{one} · {other}": value if size[one] and size[other] else None
                for (one, other), value in zip(pairs, found, strict=False)
            },
        }
    return told


def spread(unit: Tensor) -> Tensor:
    """1 − ‖mean of unit features‖²: 0 when all features are one point. unit (n, features)"""
    return 1 - unit.mean(0).square().sum()
