"""Guards keep a learned λ in bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from oneround.config.parts import GuardPart, Part, Slot
from oneround.config.sections import Positive
from oneround.training.alignment.weights import State, Uncertainty


class Guard(GuardPart):
    """A bound on λ: a penalty on its variables, or a limit."""

    def penalty(self, state: State) -> Tensor | float:
        """Added to the loss of the policy's variables."""
        return 0.0

    def limit(self, raw: Tensor) -> Tensor:
        """λ after the limit."""
        return raw


class SigmaGuard(Guard):
    """A guard that acts on σ."""

    def check(self, weight: Part) -> None:
        if not isinstance(weight, Uncertainty):
            raise ValueError(
                f"guard: {self.kind} acts on σ, which weight: {weight.kind} does not have; use guard: clamp"
            )


guards: Slot[Guard] = Slot("guard", Guard)


@guards.register("none")
class NoGuard(Guard):
    """No bound on λ."""


@guards.register("inverse-variance")
class InverseVariance(SigmaGuard):
    """+ γ/σ_a²: at the stationary point σ_a² = s·L_align + 2γ, so λ never exceeds L_base/(2γ)."""

    gamma: Positive = 0.04

    def penalty(self, state: State) -> Tensor:
        return self.gamma * (-state["b"]).exp()


@guards.register("hinge")
class Hinge(SigmaGuard):
    """+ γ·max(0, λ − most). The log term pushes λ up with slope s/2 at most, so it caps only if γ·most ≥ 1/2."""

    gamma: Positive = 0.02
    most: Positive = 50.0

    def check(self, weight: Part) -> None:
        super().check(weight)
        least = 1 / (2 * self.most)
        if self.gamma < least:
            raise ValueError(
                f"guard: hinge with gamma = {self.gamma:g} cannot cap λ at {self.most:g}; must be ≥ s/(2·most) = {least:g} (s = 1 at the start)"
            )

    def penalty(self, state: State) -> Tensor:
        return self.gamma * torch.relu((state["a"] - state["b"]).exp() - self.most)


@guards.register("clamp")
class Clamp(Guard):
    """λ ≤ most, whatever value was learned."""

    most: Positive = 50.0

    def limit(self, raw: Tensor) -> Tensor:
        return raw.clamp(max=self.most)
