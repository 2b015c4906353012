"""SGD with momentum: the fused kernel of `torch.optim.SGD`, called by its functional form.

The class loads PyTorch's compiler with its first step, which takes as long as loading PyTorch, in every process that trains.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd


class SGD:
    """Groups of parameters, each with its own learning rate; momentum lives at fixed addresses."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.groups: list[tuple[list[nn.Parameter], Tensor, float]] = []
        self.buffers: dict[nn.Parameter, Tensor] = {}
        """The momentum of every parameter; none without momentum."""

    def add(self, parameters: Sequence[nn.Parameter], rate: Tensor, weight_decay: float = 0.0) -> None:
        """A group of parameters; `rate` is a tensor that may change between steps."""
        self.groups.append((list(parameters), rate, weight_decay))
        if self.momentum:
            self.buffers |= {parameter: torch.zeros_like(parameter) for parameter in parameters}

    def zero_grad(self) -> None:
        for parameters, _, _ in self.groups:
            for parameter in parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Descend along the gradients; a parameter without one stays as it is."""
        for parameters, rate, weight_decay in self.groups:
            moving = [parameter for parameter in parameters if parameter.grad is not None]
            if moving:
                sgd(
                    list[Tensor](moving),
                    [parameter.grad for parameter in moving if parameter.grad is not None],
                    [self.buffers.get(parameter) for parameter in moving],
                    fused=True,
                    weight_decay=weight_decay,
                    momentum=self.momentum,
                    lr=rate,  # type: ignore[arg-type]  # the kernel takes a tensor too
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                )
