"""A reference distribution of features, fixed by the server and the same for all: clients pull theirs towards it.

It comes from a teacher's features of the server's public images, or from a prior that needs no image: unit vectors in all
directions alike (`sphere`), or one point per class, as far apart as can be (`simplex`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.learning.anchors import anchors
from oneround.learning.bank import teach, unit_features
from oneround.learning.loop import Emit
from oneround.learning.objective import Batch, Term, terms
from oneround.models.prototype import on_cpu
from oneround.protocol import Broadcast
from oneround.protocol.model import preprocessing
from oneround.seeds import generator
from oneround.site import Site

WIDTHS = (0.5, 1.0, 2.0)  # of the RBF kernels, in units of the reference's own mean squared distance


def make_reference(broadcast: Broadcast, server: Site | None, emit: Emit) -> dict[str, Tensor]:
    """`reference.features` (size, features), unit vectors that stand for the whole distribution."""
    recipe = broadcast.recipe
    options = recipe.reference
    assert options is not None
    classes, features = broadcast.weights["prototypes"].shape
    random = generator(recipe.seeds.initialisation, "reference")
    if options.source == "sphere":
        return {"reference.features": F.normalize(torch.randn(options.size, features, generator=random), dim=1)}
    if options.source == "simplex":
        points = anchors.parse("etf").make(classes, features, recipe.seeds.initialisation)
        return {"reference.features": points.repeat(-(-options.size // classes), 1)[: options.size]}
    teacher, images = teach(broadcast, server, options, "a reference", emit)
    chosen = torch.randperm(len(images), generator=random)[: options.size]
    kept = images.take(chosen.sort().values)
    assert server is not None
    return {"reference.features": on_cpu(unit_features(teacher, kept.batches(server.device, *preprocessing(recipe))))}


@terms.register("reference")
class ReferenceMatch(Term):
    """How far the batch's features are, as a distribution, from the server's reference."""

    needs: ClassVar[str] = "reference"

    match: Literal["moments", "coral", "mmd"] = "moments"
    """Mean and covariance; covariance alone (CORAL); or all of it by kernels (MMD)."""

    def loss(self, batch: Batch) -> Tensor:
        assert batch.reference is not None
        if self.match == "mmd":
            return mmd(batch.unit, batch.reference)
        mean, covariance = moments(batch.unit)
        goal_mean, goal_covariance = moments(batch.reference)
        apart = (covariance - goal_covariance).square().sum()
        return apart / 4 if self.match == "coral" else apart + (mean - goal_mean).square().sum()


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
    apart = one.square().sum(1)[:, None] + other.square().sum(1) - 2 * one @ other.T
    return (-apart.clamp(min=0) / width).exp().mean()
