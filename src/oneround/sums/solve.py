"""Ridge regression from sums alone: W = (Gᶜ + λI)⁻¹Mᶜ on centred features, λ by generalised cross-validation.

With Gᶜ = Σφφᵀ − ssᵀ/n and Mᶜ = Σφyᵀ − s·n_c/n,

    GCV(λ) = n·RSS(λ) / (n − df(λ))²,  df = 1 + tr(Gᶜ(Gᶜ + λI)⁻¹),  RSS = tr(YᶜᵀYᶜ) − 2tr(WᵀMᶜ) + tr(WᵀGᶜW)

(Golub, Heath and Wahba, 1979); the trace is estimated with random signs (Hutchinson, 1989), which the Cholesky factor makes
cheap, and computed exactly where n − df is too small for the estimate. Only sums enter, so the result is the pooled one for any
partition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oneround.errors import RunError
from oneround.sums.moments import Moments

STEP = 10**0.25  # ratio of one λ to the next
START = 1e-2  # first λ, relative to the mean of the diagonal
STEPS = 32  # at most, in each direction of the search
PROBES = 64  # random vectors; the standard error of the trace is √(2·df/64) or less, 10 of 3,000
CLOSE = 25  # standard errors: where n − df is smaller, the trace is computed exactly


@dataclass(frozen=True)
class Solution:
    """A linear classifier of features, (φ − centre)·W + b, and how it was chosen."""

    centre: Tensor
    """(D,) the features' mean, float64"""
    weights: Tensor
    """(D, classes)"""
    bias: Tensor
    """(classes,) the classes' shares"""
    penalty: float
    """λ over the mean of the diagonal of Gᶜ"""
    freedom: float
    """Effective degrees of freedom"""
    noise: float
    """Expected mean squared error of a score on a new image: GCV"""


def solve(moments: Moments, penalty: float | None = None, copies: int = 1) -> Solution:
    """The ridge solution; `penalty` is relative to the mean of the diagonal, None: chosen by cross-validation.

    `copies`: how often every image is in the sums (2 with mirror images); only one of them is independent.
    """
    problem = _Problem(moments, copies)
    return problem.best() if penalty is None else problem.at(penalty)


class _Problem:
    def __init__(self, moments: Moments, copies: int) -> None:
        self.n = moments.samples
        if self.n < 1:
            raise RunError("ridge: the sums contain no images")
        self.images = self.n / copies
        self.copies = copies
        self.mean, self.priors = moments.total / self.n, moments.counts / self.n
        self.gram = torch.addr(moments.gram, self.mean, moments.total, alpha=-1)
        self.cross = moments.cross - torch.outer(self.mean, moments.counts)
        self.spread = float((moments.counts - moments.counts.square() / self.n).sum())  # tr(YᶜᵀYᶜ)
        self.level = max(float(self.gram.diagonal().mean()), 1e-12)
        random = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (len(self.gram), PROBES), generator=random).double() * 2 - 1
        self.probes = signs.to(self.gram.device)
        self.probed = self.gram @ self.probes

    def at(self, penalty: float) -> Solution:
        """The solution for this λ, or for the next larger one that has a solution: sums rounded to 16 bits may need it."""
        for step in range(STEPS):
            solution = self._solve(penalty * STEP**step)
            if solution is not None:
                return solution
        raise RunError(
            f"ridge: the sums are not a valid second-moment matrix, not even with λ = {penalty * STEP**STEPS:.2g}; "
            "leave out the client that sent something else (--without CLIENT)"
        )

    def best(self) -> Solution:
        """Descend GCV in steps of λ, first one way, then the other, from a λ whose GCV is finite."""
        best = self.at(START)
        for step in range(1, STEPS):
            if self._error(best) < math.inf:
                break
            best = self.at(START * STEP**step)
        start = best.penalty
        for factor in (1 / STEP, STEP):
            for step in range(1, STEPS):
                solution = self._solve(start * factor**step)
                if solution is None or self._error(solution) >= self._error(best):
                    break
                best = solution
            if best.penalty != start:
                break
        return best

    def _solve(self, penalty: float) -> Solution | None:
        """The solution for one λ, or None where the matrix is not positive definite."""
        lifted = self.gram.clone()
        lifted.diagonal().add_(penalty * self.level)
        factor, failed = torch.linalg.cholesky_ex(lifted)
        del lifted
        if int(failed):
            return None
        weights = torch.cholesky_solve(self.cross, factor)
        freedom = 1 + self._trace(factor, penalty * self.level)
        fit = float((weights * (self.gram @ weights)).sum()) - 2 * float((weights * self.cross).sum())
        squared_error = max(self.spread + fit, 1e-12) / self.copies / weights.shape[1]  # over all images
        noise = self.images * squared_error / max(self.images - freedom, 1.0) ** 2
        return Solution(self.mean, weights, self.priors, penalty, freedom, noise)

    def _trace(self, factor: Tensor, penalty: float) -> float:
        """tr(Gᶜ(Gᶜ + λI)⁻¹), from the Cholesky factor of Gᶜ + λI."""
        estimate = float((self.probes * torch.cholesky_solve(self.probed, factor)).sum()) / PROBES
        error = math.sqrt(2 * max(estimate, 1.0) / PROBES)
        if self.images - 1 - estimate > CLOSE * error:
            return estimate
        return len(factor) - penalty * float(torch.cholesky_inverse(factor).diagonal().sum())

    def _error(self, solution: Solution) -> float:
        """GCV, the criterion for λ; infinite where the fit uses up all degrees of freedom."""
        return math.inf if self.images - solution.freedom < 1 else solution.noise
