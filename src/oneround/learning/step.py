"""One step of training: two views of a batch, the objective, its gradient, one move of the optimiser.

On a GPU the step is recorded once as a CUDA graph and replayed, so that a small network is not held up by the time it takes
to launch its kernels. Everything a step needs lives at fixed addresses: clients that take turns load their weights into the
same network, and a restarted optimiser zeroes its momentum in place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from oneround.data.augment import COLUMNS, views
from oneround.learning import objective
from oneround.models import Encoder, PrototypeNet
from oneround.models.prototype import build
from oneround.parts import Part
from oneround.protocol import Broadcast

log = logging.getLogger("oneround")
WARM_UP = 3  # steps taken as they are before one is recorded


@lru_cache(maxsize=1)
def _network(part: Part, channels: int, classes: int, device: torch.device) -> PrototypeNet:
    """The network this process trains, at addresses that stay the same from client to client and run to run."""
    net = build(part, channels, classes)
    return net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream steps run and are recorded on; one for the process, since libraries keep workspace for every stream."""
    return torch.cuda.Stream(device)


@lru_cache(maxsize=1)
def _compiled(encoder: Encoder) -> Callable[[Tensor], Tensor]:
    return torch.compile(encoder, dynamic=False)


class Stepper:
    """A network with its optimiser, and the step that trains it."""

    def __init__(
        self, broadcast: Broadcast, device: torch.device, *, bf16: bool, compiled: bool, recorded: bool
    ) -> None:
        recipe = broadcast.recipe
        assert recipe.model.encoder is not None
        self.recipe, self.training, self.device, self.bf16 = recipe, recipe.training, device, bf16
        self.shape = broadcast.shape
        self.net = _network(recipe.model.encoder, broadcast.shape[0], broadcast.classes, device)
        self.net.zero_grad(set_to_none=True)
        self.encode: Callable[[Tensor], Tensor] = _compiled(self.net.encoder) if compiled else self.net.encoder
        self.rate = torch.tensor(self.training.learning_rate, device=device)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(),
            lr=self.rate,
            momentum=self.training.momentum,
            weight_decay=self.training.weight_decay,
            fused=True,
        )
        if self.training.momentum:
            for parameter in self.net.parameters():
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.names = ["loss", *objective.active(recipe.objective), "gradient_norm"]
        self.sums = torch.zeros(len(self.names), device=device)
        self.stream = _side_stream(device) if device.type == "cuda" else None
        self.to_warm = WARM_UP if recorded and self.stream else -1
        size = 2 * self.training.batch_size
        if self.to_warm > 0:
            self.pixels = torch.zeros(size, *broadcast.shape, dtype=torch.uint8, device=device)
            self.labels = torch.zeros(size, dtype=torch.int64, device=device)
            self.numbers = torch.zeros(size, COLUMNS, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    @property
    def momentum(self) -> dict[str, Tensor]:
        """The optimiser's memory, by parameter; live, not a copy."""
        held = ((name, self.optimizer.state[parameter]) for name, parameter in self.net.named_parameters())
        return {name: state["momentum_buffer"] for name, state in held if "momentum_buffer" in state}

    def restart(self, momentum: dict[str, Tensor] | None = None) -> None:
        """Forget the momentum, or go on with one that was saved."""
        for name, buffer in self.momentum.items():
            buffer.copy_(momentum[name]) if momentum else buffer.zero_()

    def working(self) -> torch.cuda.StreamContext | nullcontext[None]:
        """The context all steps of an epoch run in."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def __call__(self, pixels: Tensor, labels: Tensor, numbers: Tensor, rate: float) -> None:
        """Train on one batch (both views): pixels (n, …) uint8, labels (n,), numbers (n, COLUMNS)."""
        self.rate.fill_(rate)
        if len(labels) != 2 * self.training.batch_size or self.to_warm < 0:
            self._step(pixels, labels, numbers)
        elif self.to_warm > 0:
            self._step(pixels, labels, numbers)
            self.to_warm -= 1
        else:
            self.pixels.copy_(pixels)
            self.labels.copy_(labels)
            self.numbers.copy_(numbers)
            if self.graph is None:
                self._record()
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step(pixels, labels, numbers)

    def largest_batch(self) -> int:
        """After memory ran out: the largest half, quarter, … of the batch size that fits; 0 if none.

        A step on an eighth more is tried, so that there is room for what else a run needs.
        """
        size = self.training.batch_size // 2
        while size:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            tried = 2 * (size + size // 8)
            pixels = torch.zeros(tried, *self.shape, dtype=torch.uint8, device=self.device)
            labels = torch.zeros(tried, dtype=torch.int64, device=self.device)
            try:
                self._step(pixels, labels, torch.zeros(tried, COLUMNS, device=self.device))
                return size
            except torch.OutOfMemoryError:
                size //= 2
        return 0

    def means(self, steps: int) -> dict[str, float]:
        """What was measured per step since the last call; waits for the device."""
        values = (self.sums / steps).tolist()
        self.sums.zero_()
        return dict(zip(self.names, values, strict=True))

    def _step(self, pixels: Tensor, labels: Tensor, numbers: Tensor) -> None:
        with torch.no_grad():
            seen = views(pixels, numbers, self.training.augment).contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            features = self.encode(seen)
        batch = objective.Batch(F.normalize(features.float(), dim=1), labels, self.net.prototypes)
        total, values = objective.evaluate(self.recipe.objective, batch)
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = clip_grad_norm_(self.net.parameters(), self.training.clip_norm or math.inf)
        self.optimizer.step()
        self.sums += torch.stack([total, *values.values(), norm]).detach()

    def _record(self) -> None:
        """Record a step on the fixed buffers; a part that cannot be recorded is run as it is."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self._step(self.pixels, self.labels, self.numbers)
            self.graph = graph
        except RuntimeError as error:
            log.warning("a step cannot be recorded as a CUDA graph and runs as it is: %s", str(error).splitlines()[0])
            self.to_warm = -1
