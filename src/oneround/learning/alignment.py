"""Alignment in a step: how far from the anchors, with what weight, and the state of one client's λ.

Everything that changes from step to step or from client to client (s, p, the entropy, the policy's variables and memory, the
ceiling) lives in tensors at fixed addresses, so that a recorded step goes on using them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneround.learning.guards import guards
from oneround.learning.objective import Batch
from oneround.learning.schedules import schedules
from oneround.learning.weights import Now, State, Uncertainty, weights
from oneround.recipe import Federated
from oneround.sections import Alignment

CEILING = "ceiling"
MOST_LOG = 700.0  # e^700 is about as large as a number gets


def label_entropy(counts: Tensor) -> float:
    """Entropy of the labels over log(classes): 0 for one class, 1 for all alike. counts (classes,)"""
    shares = counts.double() / counts.sum()
    return float(-torch.xlogy(shares, shares).sum() / math.log(len(counts)))


def instability_threshold(recipe: Federated, classes: int, features: int) -> float:
    """The λ above which momentum SGD on all prototypes oscillates with growing swings: (1 + μ)·C·d/lr.

    λ·mean (P − A)² has curvature 2λ/(C·d) in every entry; heavy-ball steps are stable below 2(1 + μ)/lr.
    """
    return (1 + recipe.training.momentum) * classes * features / recipe.training.learning_rate


class Aligner:
    """L_align, λ, and what λ keeps between steps."""

    def __init__(self, recipe: Federated, options: Alignment, anchors: Tensor, start: Tensor) -> None:
        """`anchors` and `start` (the initial prototypes): (classes, features) on the device."""
        self.options, self.anchors, self.start = options, anchors, start
        self.weight, self.schedule, self.guard = (
            weights.of(options.weight), schedules.of(options.schedule), guards.of(options.guard)
        )  # fmt: skip
        clamped = recipe.rails.on_explosion == "clamp"
        self.first_ceiling = recipe.rails.largest_weight if clamped else torch.finfo(torch.float32).max
        self.variables: dict[str, nn.Parameter] = {
            name: nn.Parameter(anchors.new_zeros(())) for name in self.weight.variables(0.5)
        }
        self.memory: State = {name: anchors.new_zeros(()) for name in self.weight.memory()}
        self.s, self.progress, self.entropy, self.ceiling, self.raw = (anchors.new_zeros(()) for _ in range(5))

    def distance(self, batch: Batch) -> Tensor:
        """L_align of a batch."""
        goal = self.anchors
        if self.options.path == "progressive":
            goal = torch.lerp(self.start, self.anchors, self.progress)
        if self.options.target == "features":
            return self._apart(batch.unit, goal[batch.labels]).mean()
        each = self._apart(batch.prototypes, goal)
        if self.options.classes == "all":
            return each.mean()
        present = F.one_hot(batch.labels, len(goal)).amax(0)
        return (each * present).sum() / present.sum()

    def _apart(self, point: Tensor, goal: Tensor) -> Tensor:
        """(n, features) twice → (n,)"""
        if self.options.distance == "cosine":
            return 1 - F.cosine_similarity(point, goal, dim=1)
        return (point - goal).square().mean(1)

    def weigh(self, base: Tensor, floor: Tensor, align: Tensor) -> Tensor:
        """The loss to descend: the network's, with λ as a number, and that of λ's variables."""
        now = Now(base.detach(), floor, align.detach(), self.s, self.entropy, {**self.variables, **self.memory})
        raw = self.weight.raw(now)
        total = self.weight.scale(now) * (base + self._let_through(raw) * align)
        learned = self.weight.loss(now)
        if learned is not None:
            own = self.weight.own_scale(now) * (learned + self.guard.penalty(now.state))
            total = total + torch.where(self.ceiling > 0, own, torch.zeros_like(own))  # dropped: nothing to learn
        with torch.no_grad():
            self.raw.copy_(raw)
            for name, value in self.weight.remember(now).items():
                self.memory[name].copy_(value)
        return total

    def _let_through(self, raw: Tensor) -> Tensor:
        acting = self.weight.effective(self.guard.limit(raw), self.s)
        return torch.where(self.ceiling > 0, torch.minimum(acting, self.ceiling), torch.zeros_like(acting))

    # --- between steps -----------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, epochs: int, consensus: float) -> None:
        """Epoch (from 0) of so many: p = epoch/epochs all through it."""
        self.progress.fill_(epoch / epochs)
        self.s.fill_(self.schedule.factor(epoch / epochs, consensus))

    def report(self, epoch: int, epochs: int, consensus: float) -> dict[str, float]:
        """λ and its parts after an epoch (from 0): what acted in its last step; raw λ, s as it is from here, and what they make."""
        applied = float(self._let_through(self.raw))
        self.s.fill_(self.schedule.factor((epoch + 1) / epochs, consensus))
        told = {
            "lambda_raw": float(self.raw),
            "s": float(self.s),
            "lambda_effective": float(self._let_through(self.raw)),
            "lambda_applied": applied,
            "entropy": float(self.entropy),
        }
        if isinstance(self.weight, Uncertainty):
            told |= {
                f"sigma_{name}": math.exp(min(self.variables[key].item(), MOST_LOG))
                for name, key in (("base", "a"), ("align", "b"))
            }
        return told

    def begin_client(self, counts: Tensor) -> None:
        """Start values for a client with so many samples of each class."""
        entropy = label_entropy(counts)
        begin = self.weight.variables(entropy) | self.weight.memory() | {CEILING: self.first_ceiling}
        self.load({name: torch.tensor(value) for name, value in begin.items()}, counts)

    def load(self, state: Mapping[str, Tensor], counts: Tensor) -> None:
        """Go on with a client's saved state."""
        self.entropy.fill_(label_entropy(counts))
        for name, held in self.live.items():
            held.copy_(state[name])

    @property
    def live(self) -> State:
        """All that belongs to the client whose turn it is; not a copy."""
        return {
            name: value.detach() for name, value in {**self.variables, **self.memory, CEILING: self.ceiling}.items()
        }
