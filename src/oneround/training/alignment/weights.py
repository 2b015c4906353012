"""λ, the weight of alignment: L = L_base + λ·L_align.

A policy is its options and a function from the quantities of a step to λ. A policy that learns declares its variables and
their loss; one with memory declares its running values. All its inputs are detached: the network's loss uses λ as a constant.

Uncertainty weighting: Kendall, Gal & Cipolla, 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from oneround.config.parts import Part, Slot
from oneround.config.sections import NotNegative, Positive

State = dict[str, Tensor]


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a policy in one step; scalars on the device, detached except `state`."""

    base: Tensor
    """L_base"""
    floor: Tensor
    """The irreducible part of L_base (log of the number of positives in a contrastive loss)."""
    align: Tensor
    """L_align"""
    s: Tensor
    """The schedule, s(p)."""
    entropy: Tensor
    """Label entropy of the client's data over log(classes): 0 for one class, 1 for equal counts."""
    state: State
    """The policy's own variables and memory."""


class Weight(Part):
    """A policy for λ."""

    def variables(self, entropy: float) -> dict[str, float]:
        """Variables learned by gradient descent on `loss`, with initial values for a client of that label entropy."""
        return {}

    def pace(self) -> tuple[float, bool]:
        """Learning rate of the variables as a multiple of the network's; whether they are clipped along with the network."""
        return 1.0, False

    def memory(self) -> dict[str, float]:
        """Running values that `remember` updates, with initial values."""
        return {}

    def raw(self, step: StepInputs) -> Tensor:
        """λ before the schedule."""
        raise NotImplementedError

    def effective(self, raw: Tensor, s: Tensor) -> Tensor:
        """λ as applied to the network."""
        return raw * s

    def scale(self, step: StepInputs) -> Tensor | float:
        """Factor of the whole loss L_base + λ·L_align."""
        return 1.0

    def loss(self, step: StepInputs) -> Tensor | None:
        """Loss of the variables; None if there are none."""
        return None

    def own_scale(self, step: StepInputs) -> Tensor | float:
        """Factor of the variables' loss, including a guard's penalty."""
        return 1.0

    def remember(self, step: StepInputs) -> State:
        """The memory after this step."""
        return {}


weights: Slot[Weight] = Slot("weight", Weight)


@weights.register("fixed")
class Fixed(Weight):
    """λ = value."""

    value: NotNegative = 5.0

    def raw(self, step: StepInputs) -> Tensor:
        return torch.full_like(step.base, self.value)


@weights.register("entropy")
class Entropy(Weight):
    """λ_k = least + H_k·(most − least): a client with balanced classes is aligned more strongly."""

    least: NotNegative = 0.1
    most: NotNegative = 10.0

    def raw(self, step: StepInputs) -> Tensor:
        return self.least + step.entropy * (self.most - self.least)


@weights.register("uncertainty")
class Uncertainty(Weight):
    """λ = σ_l²/σ_a² with a = log σ_l², b = log σ_a² learned: e^{-a}·L_base/2 + e^{-b}·L_align/2 + (a + b)/2.

    At the stationary point σ_l² = L_base and σ_a² = s·L_align, so λ·L_align tends to L_base: λ grows as alignment succeeds.
    """

    coupled: bool = False
    """Multiply the network's own loss by e^{-a}/2 too (V10 of the FAFI family); otherwise it is L_base + λ·L_align."""
    rescale: bool = False
    """Multiply the coupled loss by 2σ_l², detached, which restores the size of the network's step."""
    rate: Positive = 0.1
    """Learning rate of a and b, as a multiple of the network's."""
    clip: bool = False
    """Include a and b in the clipping of the gradient."""
    start: Literal["entropy"] | Annotated[list[float], Field(min_length=2, max_length=2)] = "entropy"
    """[a, b], or `entropy`: λ starts at the entropy policy's value."""
    attenuate: Literal["nothing", "loss", "log"] = "nothing"
    """Where s enters: nowhere, on e^{-b}·L_align/2 (V12 of the FAFI family: λ grows as s falls), or on b/2 (λ falls with s)."""
    apply: Literal["effective", "raw"] = "effective"
    """The network's weight: λ·s, or λ itself."""

    def variables(self, entropy: float) -> dict[str, float]:
        if self.start == "entropy":
            like = Entropy()
            return {"a": math.log(like.least + entropy * (like.most - like.least)), "b": 0.0}
        return dict(zip("ab", map(float, self.start), strict=True))

    def pace(self) -> tuple[float, bool]:
        return self.rate, self.clip

    def raw(self, step: StepInputs) -> Tensor:
        return (step.state["a"] - step.state["b"]).detach().exp()

    def effective(self, raw: Tensor, s: Tensor) -> Tensor:
        return raw * s if self.apply == "effective" else raw

    def scale(self, step: StepInputs) -> Tensor | float:
        return (-step.state["a"]).detach().exp() / 2 if self.coupled and not self.rescale else 1.0

    def loss(self, step: StepInputs) -> Tensor:
        a, b = step.state["a"], step.state["b"]
        on_loss = step.s if self.attenuate == "loss" else 1.0
        on_log = step.s if self.attenuate == "log" else 1.0
        return ((-a).exp() * step.base + on_loss * (-b).exp() * step.align + a + on_log * b) / 2

    def own_scale(self, step: StepInputs) -> Tensor | float:
        return 2 * step.state["a"].detach().exp() if self.rescale else 1.0


@weights.register("equilibrium")
class Equilibrium(Weight):
    """λ = min(most, s·B/(A + 2γ)): B, A running means of L_base (less its floor) and L_align.

    The stationary point of uncertainty weighting with s on the log term and the guard γ/σ², computed instead of learned: it has
    no σ and no learning rate of σ, it cannot diverge, and λ goes to 0 with s.
    """

    gamma: Positive = 0.04
    most: Positive = 50.0
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """Decay of the running means per step."""

    def memory(self) -> dict[str, float]:
        return {"base": 0.0, "align": 0.0, "mass": 0.0}

    def remember(self, step: StepInputs) -> State:
        measured = {
            "base": (step.base - step.floor).clamp(min=0),
            "align": step.align,
            "mass": torch.ones_like(step.base),
        }
        return {name: self.decay * step.state[name] + (1 - self.decay) * value for name, value in measured.items()}

    def raw(self, step: StepInputs) -> Tensor:
        means = self.remember(step)  # includes this step, so the first step already has means
        return (step.s * means["base"] / (means["align"] + 2 * self.gamma * means["mass"])).clamp(max=self.most)

    def effective(self, raw: Tensor, s: Tensor) -> Tensor:
        return raw
