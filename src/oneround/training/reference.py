"""A reference distribution of features: the server sends one to all clients, which match the distribution of theirs to it.

It comes from a teacher's features of the server's public images, or from a prior without images: uniformly
distributed unit vectors (`sphere`), or one point per class at maximal distance (`simplex`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.config.parts import Needs
from oneround.config.sections import Reference
from oneround.protocol import Broadcast
from oneround.seeds import generator
from oneround.site import Site
from oneround.training.alignment.anchors import anchors
from oneround.training.bank import public_features
from oneround.training.loop import Emit
from oneround.training.objective import Batch, Term, terms

WIDTHS = (0.5, 1.0, 2.0)  # of the RBF kernels, in units of the reference's own mean squared distance


def make_reference(options: Reference, broadcast: Broadcast, server: Site, emit: Emit) -> dict[str, Tensor]:
    """The broadcast's extra `reference.features` (size, features): unit vectors sampled from the distribution."""
    (classes, features), seed = broadcast.weights["prototypes"].shape, broadcast.recipe.seeds.initialisation
    if options.source == "sphere":
        random = generator(seed, "reference")
        sample = F.normalize(torch.randn(options.size, features, generator=random), dim=1)
    elif options.source == "simplex":
        points = anchors.parse("etf").make(classes, features, seed)
        sample = points.repeat(-(-options.size // classes), 1)[: options.size]
    else:
        sample, _ = public_features("reference", options, broadcast, server, emit)
    return {"reference.features": sample}


@terms.register("reference")
class ReferenceMatch(Term):
    """Distance between the distribution of the batch's features and the server's reference."""

    match: Literal["moments", "coral", "mmd"] = "moments"
    """Mean and covariance; covariance alone (CORAL); or the whole distribution by kernels (MMD)."""

    @property
    def needs(self) -> Needs:
        return Needs(reference=True)

    def loss(self, batch: Batch) -> Tensor:
        assert batch.reference is not None
        if self.match == "mmd":
            return mmd(batch.unit, batch.reference)
        mean, covariance = moments(batch.unit)
        reference_mean, reference_covariance = moments(batch.reference)
        distance = (covariance - reference_covariance).square().sum()
        return distance / 4 if self.match == "coral" else distance + (mean - reference_mean).square().sum()


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (d,) and covariance (d, d) of rows (n, d)."""
    mean = features.mean(0)
    centred = features - mean
    return mean, centred.T @ centred / len(features)


def mmd(one: Tensor, other: Tensor) -> Tensor:
    """Squared maximum mean discrepancy of two sets of rows, averaged over RBF kernels; 0 for the same set."""
    width = torch.cdist(other, other).square().mean().clamp(min=1e-6)
    total = one.new_zeros(())
    for factor in WIDTHS:
        total = total + _kernel(one, one, factor * width) + _kernel(other, other, factor * width)
        total = total - 2 * _kernel(one, other, factor * width)
    return total / len(WIDTHS)


def _kernel(one: Tensor, other: Tensor, width: Tensor) -> Tensor:
    squared_distances = one.square().sum(1)[:, None] + other.square().sum(1) - 2 * one @ other.T
    return (-squared_distances.clamp(min=0) / width).exp().mean()
