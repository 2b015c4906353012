"""Ridge regression from sums alone: W = (Gᶜ + λI)⁻¹Mᶜ on centred features, λ by generalised cross-validation.

With Gᶜ = Σφφᵀ − ssᵀ/n and Mᶜ = Σφyᵀ − s·n_c/n,

    GCV(λ) = n·RSS(λ) / (n − df(λ))²,  df = 1 + tr(Gᶜ(Gᶜ + λI)⁻¹),  RSS = tr(YᶜᵀYᶜ) − 2tr(WᵀMᶜ) + tr(WᵀGᶜW)

(Golub, Heath and Wahba, 1979); the trace is estimated with random signs (Hutchinson, 1989), which the Cholesky factor makes
cheap, and computed where n − df is so small that the estimate would not do. Nothing but sums enters, so the pooled answer comes out whoever held which image.
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
PROBES = 64  # random vectors; the trace is off by √(2·df/64) or less, 10 of 3,000
CLOSE = 25  # times that: where n − df is no more, the trace is computed


@dataclass(frozen=True)
class Solution:
    """A linear classifier of features, (φ − centre)·W + b, and how it was found."""

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
    """Mean squared error of a score that is to be expected of a new image: GCV"""


def solve(moments: Moments, penalty: float | None = None, copies: int = 1) -> Solution:
    """The ridge solution; `penalty` (relative to the mean of the diagonal) left out: chosen by cross-validation.

    `copies` of every image are in the sums (2 with mirror images): that many fewer are independent.
    """
    problem = _Problem(moments, copies)
    return problem.best() if penalty is None else problem.at(penalty)


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
        random = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (len(self.gram), PROBES), generator=random).double() * 2 - 1
        self.probes = signs.to(self.gram.device)
        self.probed = self.gram @ self.probes

    def at(self, penalty: float) -> Solution:
        """For this λ, or the next larger one that can be had: sums rounded to 16 bits may need more than asked for."""
        for step in range(STEPS):
            found = self._try(penalty * STEP**step)
            if found is not None:
                return found
        raise RunError(
            f"ridge: the sums are no second moments of any features, not even λ = {penalty * STEP**STEPS:.2g} helps; "
            "leave out whoever sent something else (--without CLIENT)"
        )

    def best(self) -> Solution:
        """Downhill in steps of λ, first one way, then the other; from where there is anything left to go by."""
        best = self.at(START)
        for step in range(1, STEPS):
            if self._error(best) < math.inf:
                break
            best = self.at(START * STEP**step)
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

    def _try(self, penalty: float) -> Solution | None:
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
        wrong = max(self.spread + fit, 1e-12) / self.copies / weights.shape[1]  # squared, over all images
        noise = self.images * wrong / max(self.images - freedom, 1.0) ** 2
        return Solution(self.mean, weights, self.priors, penalty, freedom, noise)

    def _trace(self, factor: Tensor, penalty: float) -> float:
        """tr(Gᶜ(Gᶜ + λI)⁻¹), from the Cholesky factor of what is inverted."""
        guess = float((self.probes * torch.cholesky_solve(self.probed, factor)).sum()) / PROBES
        off = math.sqrt(2 * max(guess, 1.0) / PROBES)
        if self.images - 1 - guess > CLOSE * off:
            return guess
        return len(factor) - penalty * float(torch.cholesky_inverse(factor).diagonal().sum())

    def _error(self, solution: Solution) -> float:
        """What λ is chosen by; where the fit uses up all images there is nothing to go by."""
        return math.inf if self.images - solution.freedom < 1 else solution.noise
