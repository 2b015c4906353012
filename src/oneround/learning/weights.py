"""λ, the weight of alignment: L = L_base + λ·L_align.

A policy is its options and a function from what is known in a step to λ. A policy that learns names its variables and the
loss they descend; one that remembers names what it keeps from step to step. Everything it sees is without gradient: the
network gets λ as a number.

Uncertainty weighting: Kendall, Gal & Cipolla, 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from oneround.parts import Part, Slot
from oneround.sections import NotNegative, Positive

State = dict[str, Tensor]


@dataclass(frozen=True)
class Now:
    """What a policy may look at in a step; numbers on the device, without gradient except `state`."""

    base: Tensor
    """L_base"""
    floor: Tensor
    """The part of L_base that no training removes (log of the number of positives in a contrastive loss)."""
    align: Tensor
    """L_align"""
    s: Tensor
    """The schedule, s(p)."""
    entropy: Tensor
    """Label entropy of the client's data over log(classes): 0 one class, 1 all alike."""
    state: State
    """The policy's own variables and memory."""


class Weight(Part):
    """How λ comes about."""

    def variables(self, entropy: float) -> dict[str, float]:
        """What gradient descent on `loss` learns, with start values for a client whose labels have that entropy."""
        return {}

    def pace(self) -> tuple[float, bool]:
        """Learning rate of the variables as a multiple of the network's; whether they are clipped along with the network."""
        return 1.0, False

    def memory(self) -> dict[str, float]:
        """What `remember` keeps from step to step, with start values."""
        return {}

    def raw(self, now: Now) -> Tensor:
        """λ before the schedule."""
        raise NotImplementedError

    def effective(self, raw: Tensor, s: Tensor) -> Tensor:
        """λ as it acts on the network."""
        return raw * s

    def scale(self, now: Now) -> Tensor | float:
        """What L_base + λ·L_align as a whole is multiplied with."""
        return 1.0

    def loss(self, now: Now) -> Tensor | None:
        """What the variables descend."""
        return None

    def own_scale(self, now: Now) -> Tensor | float:
        """What the loss of the variables, with a guard's penalty, is multiplied with."""
        return 1.0

    def remember(self, now: Now) -> State:
        """The memory after this step."""
        return {}


weights: Slot[Weight] = Slot("weight", Weight)


@weights.register("fixed")
class Fixed(Weight):
    """λ = value."""

    value: NotNegative = 5.0

    def raw(self, now: Now) -> Tensor:
        return torch.full_like(now.base, self.value)


@weights.register("entropy")
class Entropy(Weight):
    """λ_k = least + H_k·(most − least): a client with an even mix of classes is pulled more."""

    least: NotNegative = 0.1
    most: NotNegative = 10.0

    def raw(self, now: Now) -> Tensor:
        return self.least + now.entropy * (self.most - self.least)


@weights.register("uncertainty")
class Uncertainty(Weight):
    """λ = σ_l²/σ_a² with a = log σ_l², b = log σ_a² learned: e^{-a}·L_base/2 + e^{-b}·L_align/2 + (a + b)/2.

    At rest σ_l² = L_base and σ_a² = s·L_align, so λ·L_align is driven towards L_base: the better the alignment, the larger λ.
    """

    coupled: bool = False
    """The network's own loss is multiplied by e^{-a}/2 too (V10), or it sees L_base + λ·L_align as it is."""
    rescale: bool = False
    """Multiply the coupled loss by 2σ_l², as a number: the network's step gets its size back."""
    rate: Positive = 0.1
    """Learning rate of a and b, as a multiple of the network's."""
    clip: bool = False
    """Include a and b in the clipping of the gradient."""
    start: Literal["entropy"] | Annotated[list[float], Field(min_length=2, max_length=2)] = "entropy"
    """[a, b], or `entropy`: λ begins at the entropy policy's."""
    attenuate: Literal["nothing", "loss", "log"] = "nothing"
    """Where s enters: nowhere, on e^{-b}·L_align/2 (V12: λ grows as s falls), or on b/2 (λ falls with s)."""
    apply: Literal["effective", "raw"] = "effective"
    """The network's weight: λ·s, or λ itself."""

    def variables(self, entropy: float) -> dict[str, float]:
        if self.start == "entropy":
            like = Entropy()
            return {"a": math.log(like.least + entropy * (like.most - like.least)), "b": 0.0}
        return dict(zip("ab", map(float, self.start), strict=True))

    def pace(self) -> tuple[float, bool]:
        return self.rate, self.clip

    def raw(self, now: Now) -> Tensor:
        return (now.state["a"] - now.state["b"]).detach().exp()

    def effective(self, raw: Tensor, s: Tensor) -> Tensor:
        return raw * s if self.apply == "effective" else raw

    def scale(self, now: Now) -> Tensor | float:
        return (-now.state["a"]).detach().exp() / 2 if self.coupled and not self.rescale else 1.0

    def loss(self, now: Now) -> Tensor:
        a, b = now.state["a"], now.state["b"]
        on_loss = now.s if self.attenuate == "loss" else 1.0
        on_log = now.s if self.attenuate == "log" else 1.0
        return ((-a).exp() * now.base + on_loss * (-b).exp() * now.align + a + on_log * b) / 2

    def own_scale(self, now: Now) -> Tensor | float:
        return 2 * now.state["a"].detach().exp() if self.rescale else 1.0


@weights.register("equilibrium")
class Equilibrium(Weight):
    """λ = min(most, s·B/(A + 2γ)): B, A running means of L_base (less its floor) and L_align.

    The rest point of uncertainty weighting with s on the log term and the guard γ/σ², computed instead of learned: no σ, no
    learning rate of σ, nothing that can run away, and λ goes to 0 with s.
    """

    gamma: Positive = 0.04
    most: Positive = 50.0
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """How much of the running means a step keeps."""

    def memory(self) -> dict[str, float]:
        return {"base": 0.0, "align": 0.0, "mass": 0.0}

    def remember(self, now: Now) -> State:
        seen = {"base": (now.base - now.floor).clamp(min=0), "align": now.align, "mass": torch.ones_like(now.base)}
        return {name: self.decay * now.state[name] + (1 - self.decay) * value for name, value in seen.items()}

    def raw(self, now: Now) -> Tensor:
        kept = self.remember(now)  # with this step in it: the first step already has means
        return (now.s * kept["base"] / (kept["align"] + 2 * self.gamma * kept["mass"])).clamp(max=self.most)

    def effective(self, raw: Tensor, s: Tensor) -> Tensor:
        return raw
