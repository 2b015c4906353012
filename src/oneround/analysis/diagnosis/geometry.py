"""Geometry of an encoder's features on test images, and the kinds of collapse that only it shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.analysis.diagnosis.rules import Finding
from oneround.runs.record import RunRecord

FEW_DIRECTIONS = 0.5  # effective rank over classes − 1, the rank of a simplex of class means: half of it is missing
BLURRED = 2.0  # NC1: trained encoders on digits have 0.5, untrained ones 3 to 4


@dataclass(frozen=True)
class Geometry:
    """The geometry of an encoder's features on the test images of the classes that its client holds."""

    classes: int
    effective_rank: float
    """exp of the entropy of the normalised singular values of the unit features: how many directions they span."""
    nc1: float
    """Trace of the within-class scatter over that of the between-class scatter: 0 when every class is a point."""
    nc2: float
    """Mean deviation of the cosines between centred class means from −1/(C−1): 0 for a simplex ETF."""


def geometry_of(unit: Tensor, labels: Tensor) -> Geometry:
    """The geometry of unit features (n, features) with labels (n,) of at least two classes."""
    present = torch.unique(labels)
    means = torch.stack([unit[labels == label].mean(0) for label in present])
    sizes = torch.stack([(labels == label).sum() for label in present])
    own = means[torch.searchsorted(present, labels)]
    within = (unit - own).square().sum() / len(unit)
    between = ((means - unit.mean(0)).square().sum(1) * sizes).sum() / len(unit)
    return Geometry(len(present), effective_rank(unit), float(within / between), _distance_from_simplex(means))


def effective_rank(features: Tensor) -> float:
    """exp H(σ/Σσ) of the singular values: 1 when all rows are parallel, d when they fill d directions alike. features (n, d)"""
    singular = torch.linalg.svdvals(features)
    shares = singular / singular.sum()
    return math.exp(float(-torch.xlogy(shares, shares).sum()))


def _distance_from_simplex(means: Tensor) -> float:
    """Mean |cos + 1/(C−1)| over pairs of centred class means (C, d)."""
    centred = F.normalize(means - means.mean(0), dim=1)
    cosines = (centred @ centred.T)[~torch.eye(len(means), dtype=torch.bool)]
    return float((cosines + 1 / (len(means) - 1)).abs().mean())


def deep_findings(run: RunRecord, geometries: Mapping[str, Geometry]) -> Iterator[Finding]:
    """Collapse of features that no training metric shows."""
    advice = "lower training.learning_rate or λ; keep a term that pushes apart (supervised-contrastive)"
    for client, geometry in geometries.items():
        epoch = max(run.measurements.epochs.get(client, ()), default=None)
        filled, possible, nc1 = geometry.effective_rank, geometry.classes - 1, geometry.nc1
        measured = f"on test images of its {geometry.classes} classes: effective rank {filled:.2f}, NC1 {nc1:.3g}, NC2 {geometry.nc2:.2g}"
        named = {"rule": "feature-collapse", "client": client}
        if filled / possible < FEW_DIRECTIONS:
            evidence = f"{measured}; the features fill {filled:.2g} directions where the classes could have {possible}"
            yield Finding(
                "warning", epoch, filled / possible, FEW_DIRECTIONS, evidence, advice, "effective rank", **named
            )
        if not nc1 < BLURRED:
            evidence = f"{measured}; samples of one class differ {nc1:.3g} times as much as classes do"
            yield Finding("warning", epoch, nc1, BLURRED, evidence, advice, "NC1", **named)
