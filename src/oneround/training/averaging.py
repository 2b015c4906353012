"""A moving average of weights, at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class MovingAverage:
    """average ← d·average + (1 − d)·weights with d = min(decay, (1 + steps)/(10 + steps)): early weights are soon forgotten."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = dict(parameters), decay
        self.live = {name: each.detach().clone() for name, each in parameters.items()}

    @torch.no_grad()
    def update(self, steps: Tensor) -> None:
        """After step number `steps`."""
        rest = 1 - ((1 + steps) / (10 + steps)).clamp(max=self.decay)
        average = list(self.live.values())
        changes = torch._foreach_sub(list(self.parameters.values()), average)
        torch._foreach_mul_(changes, rest)
        torch._foreach_add_(average, changes)
