"""Typicality gate: listen to clients whose own data looks like x.

For test data distributed like the pooled data p(c|x) ∝ Σ_k n_k p_k(x) p_k(c|x); IFFI has no p_k(x), so a client that never
saw anything like x still votes. Here each client also sends, of the unit features of its own images without augmentation:
class means m_c (of classes with at least min(20, largest) samples), the inverse Cholesky factor of the pooled within-class
covariance (OAS shrinkage, Chen et al., 2010), and T, the mean distance of *held-out* own images to their nearest mean.

    d_c(x) = (z − m_c)ᵀ S⁻¹ (z − m_c),  t_k = min_c d_c / T,  gate g_k ∝ n_k·exp(−β t_k)
    q_k(c|x) = softmax_c((log n_c − d_c/2)/temperature),  score = Σ_k g_k q_k

Densities in different encoders are not comparable, so this is a heuristic. It reveals class counts and class means.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.fusion.iffi import Iffi
from oneround.fusion.rule import EnsembleRule, rules
from oneround.models.inference import Seen, Totals
from oneround.protocol.messages import Shapes
from oneround.sections import NotNegative, Positive

ENOUGH = 20  # samples from which a class mean counts
FOLDS = 5
RIDGE = 1e-6
TINY = 1e-30
SHUT = -1e30  # the log of a gate that lets nothing through


@rules.register("typicality-gated")
class TypicalityGated(EnsembleRule):
    """Clients' Gaussian posteriors, weighted by sample count and by how typical x is of the client's data."""

    beta: NotNegative = 1.0
    """Sharpness of the gate."""
    temperature: Positive = 1.0
    """Softness of each client's posterior."""

    @property
    def reveals(self) -> str:
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
            "typicality_scale": typical(unit, labels, classes),
        }

    def add(self, totals: Totals | None, seen: Seen) -> Totals:
        nearest, evidence = judged(seen)
        gate = (seen.expert.samples.log() - self.beta * nearest).clamp(min=SHUT)
        evidence = evidence / self.temperature
        fallback = {f"iffi_{name}": total for name, total in _IFFI.add(_inner(totals), seen).items()}
        # Streaming log-sum-exp: the largest gate so far scales all sums, so nothing underflows however atypical x is.
        if totals is None:
            return {"gate": gate, "weight": torch.ones_like(gate), "votes": evidence.softmax(1), **fallback}
        top = torch.maximum(totals["gate"], gate)
        before, now = (totals["gate"] - top).exp(), (gate - top).exp()
        votes = totals["votes"] * before + now * evidence.softmax(1)
        return {"gate": top, "weight": totals["weight"] * before + now, "votes": votes, **fallback}

    def scores(self, totals: Totals) -> Tensor:
        inner = _inner(totals)
        assert inner is not None
        votes = (totals["votes"] / totals["weight"]).clamp(min=TINY).log()
        return torch.where(totals["gate"] > SHUT, votes, _IFFI.scores(inner))  # no client with a usable class: IFFI


_IFFI = Iffi()


def _inner(totals: Totals | None) -> Totals | None:
    """The totals of the rule to fall back to."""
    if totals is None:
        return None
    return {name.removeprefix("iffi_"): total for name, total in totals.items() if name.startswith("iffi_")}


def judged(seen: Seen) -> tuple[Tensor, Tensor]:
    """What a client's statistics say of images: t (n, 1), infinite where it has no usable class, and log n_c − d_c/2 (n, classes)."""
    expert = seen.expert
    usable = expert.statistic("typicality_usable") > 0
    far = distances(seen.unit, expert.statistic("typicality_means"), expert.statistic("typicality_whitening"))
    far = far.masked_fill(~usable, torch.inf)
    evidence = expert.class_counts.clamp(min=1).log() - far.nan_to_num(posinf=-2 * SHUT) / 2
    return far.amin(1, keepdim=True) / expert.statistic("typicality_scale"), evidence


def distances(unit: Tensor, means: Tensor, whitening: Tensor) -> Tensor:
    """Squared Mahalanobis distances (n, classes); whitening is the inverse Cholesky factor L⁻¹ of the covariance."""
    return (unit @ whitening.T)[:, None].sub(means @ whitening.T).square().sum(2)


def gaussian(unit: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Class means (classes, features), which of them count (classes,), and L⁻¹ (features, features)."""
    members = F.one_hot(labels, classes).to(unit)
    counts = members.sum(0)
    means = members.T @ unit / counts.clamp(min=1)[:, None]
    usable = (counts > 0) & (counts >= min(ENOUGH, float(counts.max())))
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


def typical(unit: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean distance of held-out samples to their nearest class mean; the dimension, its expectation, for a single sample."""
    if len(unit) < 2:
        return unit.new_tensor(float(unit.shape[1]))
    fold = torch.arange(len(unit), device=unit.device) % min(FOLDS, len(unit))
    nearest = []
    for number in range(int(fold.max()) + 1):
        held = fold == number
        means, usable, whitening = gaussian(unit[~held], labels[~held], classes)
        nearest.append(distances(unit[held], means, whitening).masked_fill(~usable, torch.inf).amin(1))
    return torch.cat(nearest).mean().clamp(min=1e-6)
