"""Typicality gate: clients whose own data resembles x count more.

For test data distributed like the pooled data p(c|x) ∝ Σ_k n_k p_k(x) p_k(c|x); IFFI has no p_k(x), so a client without
data like x still votes. Here each client also uploads, of the unit features of its own images without augmentation:
class means m_c (of classes with at least min(20, largest) samples), the inverse Cholesky factor of the pooled within-class
covariance (OAS shrinkage, Chen et al., 2010), and T, the mean distance of *held-out* own images to their nearest mean.

    d_c(x) = (z − m_c)ᵀ S⁻¹ (z − m_c),  t_k = min_c d_c / T,  gate g_k ∝ n_k·exp(−β t_k)
    q_k(c|x) = softmax_c((log n_c − d_c/2)/temperature),  score = Σ_k g_k q_k

Densities in different encoders are not comparable, so this is a heuristic. It discloses class counts and class means.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.config.sections import NotNegative, Positive
from oneround.fusion.base import EnsembleRule, rules
from oneround.fusion.iffi import Iffi
from oneround.models.inference import ExpertOutput, Totals
from oneround.protocol.messages import Shapes, prefixed, strip_prefix

MIN_SAMPLES = 20  # of a class whose mean is usable
FOLDS = 5
RIDGE = 1e-6
TINY = 1e-30
MAX_NORM = 1.5  # of a unit feature or class mean, with room for 8-bit rounding
MAX_WHITENING = 1e4  # in L⁻¹: 1/√RIDGE, and room for rounding
MAX_DISTANCE = 1e12  # far above that of two unit vectors
LOG_CLOSED = -1e30  # log of a gate that is closed


@rules.register("typicality-gated")
class TypicalityGated(EnsembleRule):
    """Clients' Gaussian posteriors, weighted by sample count and by how typical x is of the client's data."""

    beta: NotNegative = 1.0
    """Sharpness of the gate."""
    temperature: Positive = 1.0
    """Temperature of each client's posterior."""

    @property
    def discloses(self) -> str:
        return "mean features of every class and their common spread"

    def statistics(self, classes: int, features: int) -> Shapes:
        return {
            "typicality_means": (classes, features),
            "typicality_usable": (classes,),
            "typicality_whitening": (features, features),
            "typicality_scale": (),
        }

    def measure(self, unit: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        means, usable, whitening = gaussian(unit, labels, classes)
        return {
            "typicality_means": means,
            "typicality_usable": usable.float(),
            "typicality_whitening": whitening,
            "typicality_scale": typical_distance(unit, labels, classes),
        }

    def check_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        means, usable, whitening, scale = (statistics[name] for name in self.statistics(1, 1))
        if not bool(((usable == 0) | (usable == 1)).all()):
            raise ValueError("typicality_usable must be 0 or 1 for every class")
        if not 0 < float(scale) <= MAX_DISTANCE:
            raise ValueError(f"typicality_scale = {float(scale):.3g}: must be above 0 and at most {MAX_DISTANCE:g}")
        if float(means.norm(dim=1).max()) > MAX_NORM:
            raise ValueError("typicality_means are of unit features and cannot be longer than 1")
        most = float(whitening.abs().max())
        if most > MAX_WHITENING:
            raise ValueError(
                f"typicality_whitening has {most:.3g}; at most {MAX_WHITENING:g} with a ridge of {RIDGE:g}"
            )
        if float(whitening.triu(1).abs().max()) > 1e-4 * most:
            raise ValueError("typicality_whitening must be a lower triangle")

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals:
        nearest, evidence = typicality(output)
        gate = (output.expert.samples.log() - self.beta * nearest).clamp(min=LOG_CLOSED)
        fallback = _IFFI.add(strip_prefix(totals, "iffi") if totals else None, output)
        return add_votes(totals, gate, (evidence / self.temperature).softmax(1)) | prefixed(iffi=fallback)

    def scores(self, totals: Totals) -> Tensor:
        votes = (totals["votes"] / totals["weight"]).clamp(min=TINY).log()
        fallback = _IFFI.scores(strip_prefix(totals, "iffi"))
        return torch.where(totals["gate"] > LOG_CLOSED, votes, fallback)  # no client with a usable class: IFFI


_IFFI = Iffi()


def add_votes(totals: Totals | None, gate: Tensor, votes: Tensor) -> Totals:
    """Add votes (n, classes), weighted by the exponential of their gate (n, 1), to a streaming log-sum-exp.

    The largest gate so far scales all sums, so nothing underflows however atypical x is.
    """
    if totals is None:
        return {"gate": gate, "weight": torch.ones_like(gate), "votes": votes}
    top = torch.maximum(totals["gate"], gate)
    before, now = (totals["gate"] - top).exp(), (gate - top).exp()
    weight = totals["weight"] * before + now
    return {"gate": top, "weight": weight, "votes": totals["votes"] * before + now * votes}


def typicality(output: ExpertOutput) -> tuple[Tensor, Tensor]:
    """t (n, 1) of a client, infinite where it has no usable class, and its log n_c − d_c/2 (n, classes)."""
    expert = output.expert
    usable = expert.statistic("typicality_usable") > 0
    squared_distances = distances(
        output.unit, expert.statistic("typicality_means"), expert.statistic("typicality_whitening")
    )
    squared_distances = squared_distances.masked_fill(~usable, torch.inf)
    evidence = expert.class_counts.clamp(min=1).log() - squared_distances.nan_to_num(posinf=-2 * LOG_CLOSED) / 2
    return squared_distances.amin(1, keepdim=True) / expert.statistic("typicality_scale"), evidence


def distances(unit: Tensor, means: Tensor, whitening: Tensor) -> Tensor:
    """Squared Mahalanobis distances (n, classes); whitening is the inverse Cholesky factor L⁻¹ of the covariance."""
    return (unit @ whitening.T)[:, None].sub(means @ whitening.T).square().sum(2)


def gaussian(unit: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Class means (classes, features), which of them are usable (classes,), and L⁻¹ (features, features)."""
    members = F.one_hot(labels, classes).to(unit)
    counts = members.sum(0)
    means = members.T @ unit / counts.clamp(min=1)[:, None]
    usable = (counts > 0) & (counts >= min(MIN_SAMPLES, float(counts.max())))
    covariance = oas(unit - means[labels])
    identity = torch.eye(unit.shape[1], device=unit.device, dtype=unit.dtype)
    factor = torch.linalg.cholesky(covariance + RIDGE * identity)
    return means, usable, torch.linalg.solve_triangular(factor, identity, upper=False)


def oas(residuals: Tensor) -> Tensor:
    """Covariance of centred rows, shrunk towards a multiple of the identity by the oracle approximating estimator."""
    n, d = residuals.shape
    covariance = residuals.T @ residuals / n
    mean_square, mu = covariance.square().mean(), covariance.diagonal().mean()
    above, below = mean_square + mu**2, (n + 1) * (mean_square - mu**2 / d)
    shrinkage = torch.where(below > 0, above / below, torch.ones_like(below)).clamp(max=1)
    return (1 - shrinkage) * covariance + shrinkage * mu * torch.eye(d, device=residuals.device, dtype=residuals.dtype)


def typical_distance(unit: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean distance of held-out samples to their nearest class mean; the dimension, its expectation, for a single sample."""
    if len(unit) < 2:
        return unit.new_tensor(float(unit.shape[1]))
    fold = torch.arange(len(unit), device=unit.device) % min(FOLDS, len(unit))
    nearest = []
    for number in range(int(fold.max()) + 1):
        held_out = fold == number
        means, usable, whitening = gaussian(unit[~held_out], labels[~held_out], classes)
        nearest.append(distances(unit[held_out], means, whitening).masked_fill(~usable, torch.inf).amin(1))
    return torch.cat(nearest).mean().clamp(min=1e-6)
