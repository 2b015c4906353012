"""Ridge regression from sums alone: W = (Gᶜ + λI)⁻¹Mᶜ on centred features, λ by generalised cross-validation.

With Gᶜ = Σφφᵀ − ssᵀ/n, Mᶜ = Σφyᵀ − s·n_c/n and e the eigenvalues of Gᶜ,

    GCV(λ) = n·RSS(λ) / (n − df(λ))²,  df = 1 + Σ e/(e + λ),  RSS = tr(YᶜᵀYᶜ) − 2tr(WᵀMᶜ) + tr(WᵀGᶜW)

(Golub, Heath and Wahba, 1979). Nothing but sums enters, so the pooled answer comes out whoever held which image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oneround.errors import RunError
from oneround.sums.moments import Moments

STEP = 10**0.25  # from one λ to the next
START = 1e-2  # times the mean of the diagonal
STEPS = 32  # of a search at most, either way


@dataclass(frozen=True)
class Solution:
    """A linear classifier of features, and how it was found."""

    weights: Tensor
    """(D, classes) float64"""
    bias: Tensor
    """(classes,)"""
    penalty: float
    """λ over the mean of the diagonal of Gᶜ"""
    freedom: float
    """Effective degrees of freedom"""
    noise: float
    """Mean variance of a score around its target"""


def solve(moments: Moments, penalty: float | None = None, copies: int = 1, *, judged: bool = True) -> Solution:
    """The ridge solution; `penalty` (relative to the mean of the diagonal) left out: chosen by cross-validation.

    `copies` of every image are in the sums (2 with mirror images): that many fewer are independent. With a penalty and not
    `judged`, freedom and noise are left at 0: their eigenvalues cost more than the solution.
    """
    problem = _Problem(moments, copies)
    return problem.best() if penalty is None else problem.at(penalty, judged)


class _Problem:
    def __init__(self, moments: Moments, copies: int) -> None:
        self.n = moments.samples
        if self.n < 1:
            raise RunError("ridge: the sums are over no images at all; nobody is left to learn from")
        self.images = self.n / copies
        self.copies = copies
        self.mean, self.priors = moments.total / self.n, moments.counts / self.n
        self.gram = torch.addr(moments.gram, self.mean, moments.total, alpha=-1)
        self.cross = moments.cross - torch.outer(self.mean, moments.counts)
        self.spread = float((moments.counts - moments.counts.square() / self.n).sum())  # tr(YᶜᵀYᶜ)
        self.level = max(float(self.gram.diagonal().mean()), 1e-12)
        self._eigenvalues: Tensor | None = None

    def at(self, penalty: float, judged: bool = True) -> Solution:
        found = self._try(penalty, judged)
        while found is None:  # sums rounded to 16 bits may need a larger λ than asked for
            penalty *= STEP
            found = self._try(penalty, judged)
        return found

    def best(self) -> Solution:
        """Downhill from the start in steps of λ, first one way, then the other."""
        best = self.at(START)
        start = best.penalty
        for factor in (1 / STEP, STEP):
            for step in range(1, STEPS):
                found = self._try(start * factor**step)
                if found is None or self._error(found) >= self._error(best):
                    break
                best = found
            if best.penalty != start:
                break
        return best

    def _try(self, penalty: float, judged: bool = True) -> Solution | None:
        """The solution for one λ, or None where the matrix is not positive definite."""
        lifted = self.gram.clone()
        lifted.diagonal().add_(penalty * self.level)
        factor, failed = torch.linalg.cholesky_ex(lifted)
        del lifted
        if int(failed):
            return None
        weights = torch.cholesky_solve(self.cross, factor)
        del factor
        bias = self.priors - self.mean @ weights
        if not judged:
            return Solution(weights, bias, penalty, 0.0, 0.0)
        fit = float((weights * (self.gram @ weights)).sum()) - 2 * float((weights * self.cross).sum())
        freedom = 1 + self._freedom(penalty * self.level)
        left = max(self.images - freedom, 1.0)
        noise = max(self.spread + fit, 1e-12) / self.copies / left / weights.shape[1]
        return Solution(weights, bias, penalty, freedom, noise)

    def _freedom(self, ridge: float) -> float:
        if self._eigenvalues is None:
            self._eigenvalues = torch.linalg.eigvalsh(self.gram).clamp(min=0)
        return float((self._eigenvalues / (self._eigenvalues + ridge)).sum())

    def _error(self, solution: Solution) -> float:
        """GCV up to a constant: the noise is RSS/(n − df)."""
        left = self.images - solution.freedom
        return math.inf if left < 1 else solution.noise / left
