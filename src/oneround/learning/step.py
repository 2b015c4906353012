"""One step of training: random views of a batch, the objective and the alignment, their gradient, one move of the optimiser.

On a GPU the step is recorded once as a CUDA graph and replayed, so that a small network is not held up by the time it takes
to launch its kernels. Everything a step needs lives at fixed addresses: clients that take turns load their weights into the
same network, and a restarted optimiser zeroes its momentum in place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from oneround.data.augment import COLUMNS, views
from oneround.learning import objective, trace
from oneround.learning.alignment import Aligner
from oneround.learning.memory import FeatureQueue
from oneround.models import Encoder, PrototypeNet
from oneround.models.prototype import build
from oneround.parts import Part
from oneround.protocol import Broadcast
from oneround.sections import Stage

log = logging.getLogger("oneround")
WARM_UP = 3  # steps taken as they are before one is recorded


@lru_cache(maxsize=2)
def _network(part: Part, channels: int, classes: int, head: str, device: torch.device, _beside: bool) -> PrototypeNet:
    """The network this process trains, at addresses that stay the same from client to client and run to run.

    `_beside`: the one that learns at its side, if there is one.
    """
    net = build(part, channels, classes, head)
    return net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream steps run and are recorded on; one for the process, since libraries keep workspace for every stream."""
    return torch.cuda.Stream(device)


@lru_cache(maxsize=1)
def _compiled(encoder: Encoder) -> Callable[[Tensor], Tensor]:
    return torch.compile(encoder, dynamic=False)


@dataclass
class StageSteps:
    """What the steps of one stage of the training minimise and measure, and their recording."""

    terms: objective.Weighted
    aligns: bool
    sums: Tensor
    to_warm: int
    graph: torch.cuda.CUDAGraph | None = None
    seen: objective.Batch | None = None
    """What the recorded step computes of its batch; changes with every replay."""
    names: list[str] = field(default_factory=list)


class Stepper:
    """A network with its optimiser, and the step that trains it."""

    def __init__(
        self,
        broadcast: Broadcast,
        device: torch.device,
        *,
        bf16: bool,
        compiled: bool,
        recorded: bool,
        teacher: Callable[[Tensor], Tensor] | None = None,
        beside: bool = False,
    ) -> None:
        """`teacher`: normalised images → scores, for a term that copies its answers."""
        recipe = broadcast.recipe
        assert recipe.model.encoder is not None
        self.recipe, self.training, self.device, self.bf16 = recipe, recipe.training, device, bf16
        self.shape, self.teacher = broadcast.shape, teacher
        self.net = _network(
            recipe.model.encoder, broadcast.shape[0], broadcast.classes, recipe.model.head, device, beside
        )
        self.net.zero_grad(set_to_none=True)
        self.encode: Callable[[Tensor], Tensor] = _compiled(self.net.encoder) if compiled else self.net.encoder
        extras = {name: tensor.to(device) for name, tensor in broadcast.extras.items()}
        self.bank = objective.Features(extras["bank.features"], extras["bank.labels"]) if recipe.bank else None
        self.reference = extras["reference.features"] if recipe.reference else None
        self.queue = FeatureQueue(recipe.queue, self.net.encoder.features, device) if recipe.queue else None
        self.prior = torch.zeros(broadcast.classes, device=device)
        self.aligner = None
        if recipe.alignment is not None:
            start = broadcast.weights["prototypes"].to(device)
            self.aligner = Aligner(recipe, recipe.alignment, extras["anchors"], start)
        self._make_optimizer()
        self.stream = _side_stream(device) if device.type == "cuda" else None
        size = self.full
        if recorded and self.stream:
            self.pixels = torch.zeros(size, *broadcast.shape, dtype=torch.uint8, device=device)
            self.labels = torch.zeros(size, dtype=torch.int64, device=device)
            self.numbers = torch.zeros(size, COLUMNS, device=device)
        stages: list[Stage | None] = [*recipe.objective.stages] or [None]
        self.stages = [self._stage(stage, WARM_UP if recorded and self.stream else -1) for stage in stages]
        self.now = self.stages[0]
        self.seen: objective.Batch | None = None

    @property
    def full(self) -> int:
        """Images in a full batch, all views."""
        return self.training.views * self.training.batch_size

    def _make_optimizer(self) -> None:
        """SGD on the network, and on λ's variables at a pace of their own."""
        training = self.training
        self.rate, self.own_rate = (torch.tensor(training.learning_rate, device=self.device) for _ in range(2))
        self.pace, self.clipped = self.aligner.weight.pace() if self.aligner else (1.0, False)
        self.variables = list(self.aligner.variables.values()) if self.aligner else []
        groups: list[dict[str, Any]] = [{"params": list(self.net.parameters())}]
        if self.variables:
            groups.append({"params": self.variables, "lr": self.own_rate, "weight_decay": 0.0})
        decay, momentum = training.weight_decay, training.momentum
        self.optimizer = torch.optim.SGD(groups, lr=self.rate, momentum=momentum, weight_decay=decay, fused=True)
        if momentum:
            for parameter in (*self.net.parameters(), *self.variables):
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def _stage(self, stage: Stage | None, to_warm: int) -> StageSteps:
        terms = objective.active(self.recipe.objective, stage)
        aligns = self.aligner is not None and (stage is None or stage.align)
        names = ["loss", "base", *(["align"] if aligns else []), *terms, "gradient_norm"]
        return StageSteps(terms, aligns, torch.zeros(len(names), device=self.device), to_warm, names=names)

    @property
    def momentum(self) -> dict[str, Tensor]:
        """The optimiser's memory, by parameter; live, not a copy."""
        named = dict(self.net.named_parameters()) | (dict(self.aligner.variables) if self.aligner else {})
        held = ((name, self.optimizer.state[parameter]) for name, parameter in named.items())
        return {name: state["momentum_buffer"] for name, state in held if "momentum_buffer" in state}

    def restart(self, momentum: dict[str, Tensor] | None = None) -> None:
        """Forget the momentum, or go on with one that was saved."""
        for name, buffer in self.momentum.items():
            buffer.copy_(momentum[name]) if momentum else buffer.zero_()

    def enter(self, stage: int) -> None:
        """Take the steps of that stage from here on."""
        self.now = self.stages[stage]

    def working(self) -> torch.cuda.StreamContext | nullcontext[None]:
        """The context all steps of an epoch run in."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def __call__(self, pixels: Tensor, labels: Tensor, numbers: Tensor, rate: float) -> None:
        """Train on one batch (all views): pixels (n, …) uint8, labels (n,), numbers (n, COLUMNS)."""
        self.rate.fill_(rate)
        self.own_rate.fill_(rate * self.pace)
        if len(labels) != self.full or self.now.to_warm < 0:
            self._step(pixels, labels, numbers)
        elif self.now.to_warm > 0:
            self._step(pixels, labels, numbers)
            self.now.to_warm -= 1
        else:
            self.pixels.copy_(pixels)
            self.labels.copy_(labels)
            self.numbers.copy_(numbers)
            if self.now.graph is None:
                self._record()
            if self.now.graph is not None:
                self.now.graph.replay()
                self.seen = self.now.seen
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
            tried = self.training.views * (size + size // 8)
            pixels = torch.zeros(tried, *self.shape, dtype=torch.uint8, device=self.device)
            labels = torch.zeros(tried, dtype=torch.int64, device=self.device)
            try:
                self._step(pixels, labels, torch.zeros(tried, COLUMNS, device=self.device))
                return size
            except torch.OutOfMemoryError:
                size //= 2
        return 0

    def means(self, steps: int) -> dict[str, float]:
        """What was measured per step since the last call, and how spread out the last features are; waits for the device."""
        assert self.seen is not None
        values = torch.cat([self.now.sums / steps, trace.spread(self.seen.unit)[None]]).tolist()
        self.now.sums.zero_()
        return dict(zip([*self.now.names, "spread"], values, strict=True))

    def gradients(self) -> dict[str, Any]:
        """Norms and cosines of the terms' gradients on the last batch."""
        assert self.seen is not None
        return trace.gradients(
            self.now.terms, self.seen, self.aligner.distance if self.aligner and self.now.aligns else None
        )

    def _step(self, pixels: Tensor, labels: Tensor, numbers: Tensor) -> None:
        with torch.no_grad():
            seen = views(pixels, numbers, self.training.augment).contiguous(memory_format=torch.channels_last)
            answers = self.teacher(seen) if self.teacher else None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            features = self.encode(seen).float()
        queued = self.queue.features if self.queue else None
        batch = objective.Batch(
            F.normalize(features, dim=1),
            labels,
            self.net.prototypes,
            self.prior,
            self.bank,
            queued,
            self.reference,
            answers,
            *((features.norm(dim=1, keepdim=True), self.net.bias) if self.net.bias is not None else ()),
        )
        base, values = objective.evaluate(self.now.terms, batch)
        total, measured = base, [base]
        if self.aligner is not None and self.now.aligns:
            align = self.aligner.distance(batch)
            total = self.aligner.weigh(base, objective.floor(self.now.terms, batch), align)
            measured.append(align)
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        clipped = [*self.net.parameters(), *(self.variables if self.clipped else [])]
        norm = clip_grad_norm_(clipped, self.training.clip_norm or math.inf)
        self.optimizer.step()
        self.now.sums += torch.stack([total, *measured, *values.values(), norm]).detach()
        lengths = None if batch.lengths is None else batch.lengths.detach()
        self.seen = replace(batch, unit=batch.unit.detach(), lengths=lengths)
        if self.queue:
            self.queue.push(batch)

    def _record(self) -> None:
        """Record a step on the fixed buffers; a part that cannot be recorded is run as it is."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self._step(self.pixels, self.labels, self.numbers)
            self.now.graph, self.now.seen = graph, self.seen
        except RuntimeError as error:
            log.warning("a step cannot be recorded as a CUDA graph and runs as it is: %s", str(error).splitlines()[0])
            self.now.to_warm = -1
