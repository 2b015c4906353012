"""Alignment in a step: the distance to the anchors, its weight λ, and the state of one client's λ.

Everything that changes from step to step or from client to client (s, p, the entropy, the policy's variables and memory, the
ceiling) lives in tensors at fixed addresses, so that a recorded step uses the current values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneround.config.recipe import Federated
from oneround.config.sections import Alignment
from oneround.training.alignment.guards import guards
from oneround.training.alignment.schedules import schedules
from oneround.training.alignment.weights import State, StepInputs, Uncertainty, weights
from oneround.training.objective import Batch

CEILING = "ceiling"
LARGEST_LOG = 700.0  # e^700 is close to the largest float64


def label_entropy(counts: Tensor) -> float:
    """Entropy of the labels over log(classes): 0 for one class, 1 for equal counts. counts (classes,)"""
    shares = counts.double() / counts.sum()
    return float(-torch.xlogy(shares, shares).sum() / math.log(len(counts)))


def instability_threshold(recipe: Federated, classes: int, features: int) -> float:
    """The λ above which momentum SGD on all prototypes diverges: (1 + μ)·C·d/lr.

    λ·mean (P − A)² has curvature 2λ/(C·d) in every entry; heavy-ball steps are stable below 2(1 + μ)/lr.
    """
    return (1 + recipe.training.momentum) * classes * features / recipe.training.learning_rate


class Aligner:
    """L_align, λ, and the state of λ between steps."""

    def __init__(
        self, recipe: Federated, options: Alignment, anchors: Tensor, start: Tensor, lead: tuple[int, ...] = ()
    ) -> None:
        """`anchors` and `start` (the initial prototypes): (classes, features) on the device.

        `lead`: (clients,) where a step has several clients; each has a state of its own, and all losses have that shape.
        """
        self.options, self.anchors, self.start, self.epochs = options, anchors, start, recipe.training_epochs
        self.weight, self.schedule = weights.of(options.weight), schedules.of(options.schedule)
        self.guard = guards.of(options.guard)
        clamped = recipe.safeguards.on_explosion == "clamp"
        self.initial_ceiling = recipe.safeguards.largest_weight if clamped else torch.finfo(torch.float32).max
        self.variables: dict[str, nn.Parameter] = {
            name: nn.Parameter(anchors.new_zeros(lead)) for name in self.weight.variables(0.5)
        }
        self.memory: State = {name: anchors.new_zeros(lead) for name in self.weight.memory()}
        self.s, self.progress = (anchors.new_zeros(()) for _ in range(2))
        self.entropy, self.ceiling, self.raw, self.base_share = (anchors.new_zeros(lead) for _ in range(4))

    def distance(self, batch: Batch) -> Tensor:
        """L_align of a batch."""
        targets = self.anchors
        if self.options.path == "progressive":
            targets = torch.lerp(self.start, self.anchors, self.progress)
        if self.options.target == "features":
            return self._distances(batch.unit, targets[batch.labels]).mean()
        by_class = self._distances(batch.prototypes, targets)
        if self.options.classes == "all":
            return by_class.mean()
        present = F.one_hot(batch.labels, len(targets)).amax(0)
        return (by_class * present).sum() / present.sum()

    def _distances(self, points: Tensor, targets: Tensor) -> Tensor:
        """(n, features) twice → (n,)"""
        if self.options.distance == "cosine":
            return 1 - F.cosine_similarity(points, targets, dim=1)
        return (points - targets).square().mean(1)

    def weigh(self, base: Tensor, floor: Tensor, align: Tensor) -> Tensor:
        """The loss to minimise: the network's, with λ as a constant, plus that of λ's variables."""
        step = StepInputs(base.detach(), floor, align.detach(), self.s, self.entropy, {**self.variables, **self.memory})
        raw = self.weight.raw(step)
        if self.options.one_class == "alignment":
            base = self.base_share * base
        total = self.weight.scale(step) * (base + self._effective(raw) * align)
        own_loss = self.weight.loss(step)
        if own_loss is not None:
            own_loss = self.weight.own_scale(step) * (own_loss + self.guard.penalty(step.state))
            total = total + torch.where(self.ceiling > 0, own_loss, torch.zeros_like(own_loss))  # once dropped, λ stays
        with torch.no_grad():
            self.raw.copy_(raw)
            for name, value in self.weight.remember(step).items():
                self.memory[name].copy_(value)
        return total

    def _effective(self, raw: Tensor) -> Tensor:
        """λ after guard, schedule and ceiling."""
        effective = self.weight.effective(self.guard.limit(raw), self.s)
        return torch.where(self.ceiling > 0, torch.minimum(effective, self.ceiling), torch.zeros_like(effective))

    # --- between steps -----------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, consensus: float) -> None:
        """Set the schedule for an epoch (from 0): p = epoch/epochs throughout it."""
        self.progress.fill_(epoch / self.epochs)
        self.s.fill_(self.schedule.factor(epoch / self.epochs, consensus))

    def report(self, epoch: int, consensus: float) -> dict[str, float]:
        """λ and its parts after an epoch (from 0): λ applied in its last step; raw λ, the next s, and the λ they give."""
        applied = float(self._effective(self.raw))
        self.s.fill_(self.schedule.factor((epoch + 1) / self.epochs, consensus))
        metrics = {
            "lambda_raw": float(self.raw),
            "s": float(self.s),
            "lambda_effective": float(self._effective(self.raw)),
            "lambda_applied": applied,
            "entropy": float(self.entropy),
        }
        if isinstance(self.weight, Uncertainty):
            for name, key in (("sigma_base", "a"), ("sigma_align", "b")):
                metrics[name] = math.exp(min(self.variables[key].item(), LARGEST_LOG))
        return metrics

    def begin_client(self, counts: Tensor) -> None:
        """Initialise the state for a client with these class counts."""
        entropy = label_entropy(counts)
        self.entropy.fill_(entropy)
        self.base_share.fill_(float(int((counts > 0).sum()) > 1))
        initial = self.weight.variables(entropy) | self.weight.memory() | {CEILING: self.initial_ceiling}
        for name, tensor in self.live.items():
            tensor.fill_(initial[name])

    def client(self, number: int) -> Aligner:
        """One client's aligner, of several; the same tensors, but the schedule is its own."""
        return self._with_state(lambda tensor: tensor[number])

    def on_cpu(self) -> Aligner:
        """A copy whose values are read without waiting for the device."""
        return self._with_state(lambda tensor: tensor.to("cpu", copy=True))

    def _with_state(self, change: Callable[[Tensor], Tensor]) -> Aligner:
        changed = copy(self)
        changed.variables = {
            name: nn.Parameter(change(value.detach()), requires_grad=False) for name, value in self.variables.items()
        }
        changed.memory = {name: change(value) for name, value in self.memory.items()}
        changed.entropy, changed.ceiling, changed.raw = map(change, (self.entropy, self.ceiling, self.raw))
        changed.base_share = change(self.base_share)
        changed.s, changed.progress = (value.to(changed.raw.device, copy=True) for value in (self.s, self.progress))
        return changed

    @property
    def live(self) -> State:
        """The current client's state; live tensors, not a copy."""
        state = {**self.variables, **self.memory, CEILING: self.ceiling}
        return {name: value.detach() for name, value in state.items()}
