"""SGD with momentum, Adam and AdamW: the fused kernels of `torch.optim`, called by their functional form.

The classes there load PyTorch's compiler with their first step, which takes as long as loading PyTorch, in every process that trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

BETA2, EPSILON = 0.999, 1e-8  # of Adam
Buffers = dict[nn.Parameter, Tensor]


class Optimizer(ABC):
    """Groups of parameters, each with its own learning rate; what it remembers lives at fixed addresses."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.groups: list[tuple[list[nn.Parameter], Tensor, float]] = []

    @property
    @abstractmethod
    def state(self) -> Mapping[str, Buffers]:
        """All it remembers of each parameter, by the suffix of its name in a state file."""

    def add(self, parameters: Sequence[nn.Parameter], rate: Tensor, weight_decay: float = 0.0) -> None:
        """A group of parameters; `rate` is a tensor that may change between steps."""
        self.groups.append((list(parameters), rate, weight_decay))

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
                gradients = [parameter.grad for parameter in moving if parameter.grad is not None]
                self._descend(moving, gradients, rate, weight_decay)

    @abstractmethod
    def _descend(
        self, moving: list[nn.Parameter], gradients: list[Tensor], rate: Tensor, weight_decay: float
    ) -> None: ...


class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    def __init__(self, momentum: float, *, nesterov: bool = False) -> None:
        super().__init__(momentum)
        self.nesterov = nesterov
        self.buffers: Buffers = {}
        """The momentum of every parameter; none without momentum."""

    @property
    def state(self) -> Mapping[str, Buffers]:
        return {"": self.buffers}

    def add(self, parameters: Sequence[nn.Parameter], rate: Tensor, weight_decay: float = 0.0) -> None:
        super().add(parameters, rate, weight_decay)
        if self.momentum:
            self.buffers |= {parameter: torch.zeros_like(parameter) for parameter in parameters}

    def _descend(self, moving: list[nn.Parameter], gradients: list[Tensor], rate: Tensor, weight_decay: float) -> None:
        sgd(
            list[Tensor](moving),
            gradients,
            [self.buffers.get(parameter) for parameter in moving],
            fused=True,
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=rate,  # type: ignore[arg-type]  # the kernel takes a tensor too
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
        )


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015); `momentum` is β₁."""

    kernel: ClassVar[Callable[..., None]] = staticmethod(adam)

    def __init__(self, momentum: float, beta2: float = BETA2) -> None:
        super().__init__(momentum)
        self.beta2 = beta2
        self.means: Buffers = {}
        self.squares: Buffers = {}
        self.steps: Buffers = {}

    @property
    def state(self) -> Mapping[str, Buffers]:
        return {"": self.means, ".square": self.squares, ".steps": self.steps}

    def add(self, parameters: Sequence[nn.Parameter], rate: Tensor, weight_decay: float = 0.0) -> None:
        super().add(parameters, rate, weight_decay)
        for parameter in parameters:
            self.means[parameter], self.squares[parameter] = (torch.zeros_like(parameter) for _ in range(2))
            self.steps[parameter] = torch.zeros((), device=parameter.device)

    def _descend(self, moving: list[nn.Parameter], gradients: list[Tensor], rate: Tensor, weight_decay: float) -> None:
        self.kernel(
            list[Tensor](moving),
            gradients,
            [self.means[parameter] for parameter in moving],
            [self.squares[parameter] for parameter in moving],
            [],
            [self.steps[parameter] for parameter in moving],
            fused=True,
            amsgrad=False,
            beta1=self.momentum,
            beta2=self.beta2,
            lr=rate,
            weight_decay=weight_decay,
            eps=EPSILON,
            maximize=False,
        )


class AdamW(Adam):
    """Adam whose weight decay is no part of the gradient (Loshchilov and Hutter, 2019)."""

    kernel: ClassVar[Callable[..., None]] = staticmethod(adamw)
