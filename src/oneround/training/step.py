"""One training step: random views of a batch, the objective and the alignment, their gradient, one optimiser step.

On a GPU the step is recorded once as a CUDA graph and replayed, which avoids the kernel launch overhead of small networks. All
tensors of a step live at fixed addresses: clients that take turns load their weights into the same network, and a restarted
optimiser zeroes its momentum in place.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from oneround.config.recipe import Local
from oneround.config.sections import Stage
from oneround.data.augment import columns_of, views
from oneround.data.images import Shape
from oneround.models.precision import with_cast_weights
from oneround.models.prototype import PrototypeNet, build
from oneround.protocol.messages import Broadcast, prefixed
from oneround.site import Site
from oneround.training import objective, trace
from oneround.training.alignment.aligner import Aligner
from oneround.training.copies import overwrite
from oneround.training.feature_queue import FeatureQueue
from oneround.training.optimizers import SGD, Adam, Optimizer
from oneround.training.shared_base import SharedBase

log = logging.getLogger("oneround")
WARM_UP = 3  # eager steps before the first is recorded
MOST_RECORDED = 64  # sizes of batches, in a stage
AHEAD = (
    4  # recorded steps that wait for the device: its queue never fills, which would make other threads wait for it too
)
EXTRAS = ("anchors", "bank.features", "bank.labels", "reference.features")
"""The broadcast's extras that a training step reads."""
Losses = tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]
"""L_base, every term's value; the irreducible part of L_base and L_align, where the stage aligns."""


unrecorded = threading.RLock()
"""Held by a thread that works on the device otherwise than by replaying a step: the library of convolutions makes the whole device wait
when it compares algorithms, and nothing may do that while another thread records."""


@contextmanager
def searching(local: Local) -> Iterator[None]:
    """`unrecorded`, for steps that train: the library of convolutions compares algorithms, which takes seconds and pays only there.

    The setting is of the whole process, so nobody else may work on the device meanwhile.
    """
    with unrecorded:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = not local.deterministic
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


class _Streams(threading.local):
    """The streams that steps run and are recorded on, one per thread and device: libraries keep a workspace for every stream."""

    def __init__(self) -> None:
        self.of = lru_cache(torch.cuda.Stream)


_streams = _Streams()


@dataclass
class StageSteps:
    """The terms, metrics and recorded graphs of the steps of one stage."""

    terms: objective.Weighted
    aligns: bool
    names: list[str]
    sums: Tensor
    """Of the metrics with these names, over the steps of an epoch."""
    records: bool
    """Whether steps are recorded."""
    recorded: dict[int, tuple[torch.cuda.CUDAGraph, objective.Batch | None]] = field(default_factory=dict)
    """By number of images; every replay overwrites the batch."""
    eager: Counter[int] = field(default_factory=Counter)
    """Steps made without a recording, by number of images."""

    def is_due(self, images: int) -> bool:
        """Whether the next step of this size is to be recorded."""
        warm = self.eager[images] >= (1 if self.recorded else WARM_UP)
        return self.records and warm and images not in self.recorded and len(self.recorded) < MOST_RECORDED


class ClientState(ABC):
    """All that belongs to one client while it trains, live: network, momentum, λ's state, queue."""

    net: nn.Module
    aligner: Aligner | None = None
    queue: FeatureQueue | None = None

    @property
    def learned(self) -> dict[str, Tensor]:
        """Every tensor that training changes, the momentum aside; live, not a copy."""
        alignment = self.aligner.live if self.aligner else {}
        return prefixed(net=self.net.state_dict(), alignment=alignment, queue=self.queue.live if self.queue else {})

    @property
    @abstractmethod
    def momentum(self) -> dict[str, Tensor]:
        """The optimiser's momentum buffers by parameter; live, not a copy."""

    def begin_client(self, counts: Tensor) -> None:
        """Start the training of a client with these class counts."""
        self.restart()
        if self.queue:
            self.queue.clear()
        if self.aligner:
            self.aligner.begin_client(counts)

    def restart(self, momentum: dict[str, Tensor] | None = None) -> None:
        """Reset the momentum, or load a saved one."""
        live = self.momentum
        if momentum:
            overwrite(live, momentum)
        elif live:
            torch._foreach_zero_(list(live.values()))


class RecordedStep(ClientState):
    """A network, its optimiser and its training step, which is recorded on fixed buffers and replayed."""

    optimizer: Optimizer
    stage: StageSteps
    full: int
    """Images in a full batch, all views."""
    views = 1
    """Of every sample."""
    last_batch: objective.Batch | None = None
    """Of a network that classifies."""

    def __init__(self, shape: Shape, site: Site, columns: int) -> None:
        """`columns`: random numbers of an image."""
        self.shape, self.columns, self.local = shape, columns, site.local
        self.device, self.bf16 = site.device, site.bf16
        self.stream = _streams.of(self.device) if self.device.type == "cuda" else None
        self.records = site.local.record and self.stream is not None
        self.inputs: tuple[Tensor, ...] = ()
        """The batch that a recorded step reads; a smaller one is at its start."""
        self.rate = torch.zeros((), device=self.device)
        self._pool: Any = None
        """Of the device's memory, for all recorded steps: one runs at a time."""
        self._ahead: deque[torch.cuda.Event] = deque()
        """Ends of the last recorded steps."""

    def _begin_batches(self, full: int) -> None:
        self.full = full
        self.inputs = self._blank_batch(full if self.records else 0)

    @property
    def momentum(self) -> dict[str, Tensor]:
        """The optimiser's buffers by parameter; live, not a copy."""
        named = {**dict(self.net.named_parameters()), **(self.aligner.variables if self.aligner else {})}
        return {
            name + suffix: buffers[parameter]
            for suffix, buffers in self.optimizer.state.items()
            for name, parameter in named.items()
            if parameter in buffers
        }

    @abstractmethod
    def bind(self, broadcast: Broadcast) -> None:
        """Copy a broadcast's values into the buffers."""

    @abstractmethod
    def begin_epoch(self, epoch: int, consensus: float) -> None:
        """Prepare an epoch (from 0) of the whole training."""

    @abstractmethod
    def means(self, steps: int) -> dict[str, float]:
        """Mean metrics per step since the last call; waits for the device."""

    @abstractmethod
    def _step(self, pixels: Tensor, labels: Tensor, numbers: Tensor) -> None: ...

    def gradients(self) -> dict[str, Any]:
        """Norms and cosines of the terms' gradients on the last batch."""
        return {}

    def _blank_batch(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros as pixels, labels and random numbers of so many images."""
        pixels = torch.zeros(size, *self.shape, dtype=torch.uint8, device=self.device)
        labels = torch.zeros(size, dtype=torch.int64, device=self.device)
        return pixels, labels, torch.zeros(size, self.columns, device=self.device)

    def stream_context(self) -> torch.cuda.StreamContext | nullcontext[None]:
        """The context all steps of an epoch run in."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def __call__(self, pixels: Tensor, labels: Tensor, numbers: Tensor, rate: float) -> None:
        """Train on one batch (all views): pixels (n, …) uint8, labels (n,), numbers (n, columns)."""
        self._set_rate(rate)
        images = len(labels)
        if self.stage.is_due(images):
            self._record(images)
        if images not in self.stage.recorded:
            with searching(self.local):
                self._step(pixels, labels, numbers)
            self.stage.eager[images] += 1
            return
        for buffer, value in zip(self._inputs(images), (pixels, labels, numbers), strict=True):
            buffer.copy_(value)
        graph, self.last_batch = self.stage.recorded[images]
        graph.replay()
        replayed = torch.cuda.Event(blocking=True)
        replayed.record()
        self._ahead.append(replayed)
        if len(self._ahead) > AHEAD:
            self._ahead.popleft().synchronize()

    def _set_rate(self, rate: float) -> None:
        self.rate.fill_(rate)

    def _inputs(self, images: int) -> tuple[Tensor, ...]:
        """The buffers that a recorded step of so many images reads."""
        return tuple(buffer[:images] for buffer in self.inputs)

    def rehearse(self) -> None:
        """A step on nothing: libraries load, convolutions are chosen. What it leaves behind is of no use."""
        with self.stream_context(), searching(self.local):
            self._step(*self._blank_batch(self.full))

    def largest_batch(self) -> int:
        """After an out-of-memory error: the largest half, quarter, … of the batch size that fits; 0 if none.

        A step on an eighth more is tried, to leave room for the rest of a run.
        """
        size = self.full // self.views // 2
        while size:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            try:
                with searching(self.local):
                    self._step(*self._blank_batch(self.views * (size + size // 8)))
                return size
            except torch.OutOfMemoryError:
                size //= 2
        return 0

    def _record(self, images: int) -> None:
        """Record a step on the fixed buffers; where one cannot be recorded, all of the stage run eagerly."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads use the device meanwhile: one trains another client, one writes the states of idle ones.
            with (
                searching(self.local),
                torch.cuda.graph(graph, self._pool, self.stream, capture_error_mode="thread_local"),
            ):
                self._step(*self._inputs(images))
        except RuntimeError as error:
            log.warning("a step cannot be recorded as a CUDA graph and runs eagerly: %s", str(error).splitlines()[0])
            self.stage.records = False
            return
        self._pool = graph.pool()
        self.stage.recorded[images] = graph, self.last_batch


class Stepper(RecordedStep):
    """The step of a network that classifies."""

    net: PrototypeNet
    prior: Tensor

    lead: tuple[int, ...] = ()
    """Leading dimensions of all that belongs to a client: (clients,) where a step trains several (batched_step.py)."""

    def __init__(self, broadcast: Broadcast, site: Site, teacher: Callable[[Tensor], Tensor] | None = None) -> None:
        """Allocate buffers of this broadcast's sizes; `bind` fills them. `teacher`: normalised images → scores."""
        recipe, training, device = broadcast.recipe, broadcast.recipe.training, site.device
        super().__init__(broadcast.shape, site, columns_of(training.augment))
        self.recipe, self.training, self.views, self.teacher = recipe, training, training.views, teacher
        net = self._build(broadcast)
        self.net = net.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.shared_base = SharedBase(self.net, recipe.share) if recipe.share else None
        self.encode: Callable[[Tensor], Tensor] = self.net.encoder
        if site.local.compile:
            self.encode = torch.compile(self.net.encoder, dynamic=False)
        elif self.bf16:
            self.encode = with_cast_weights(self.net.encoder)
        extras = {name: broadcast.extras[name] for name in EXTRAS if name in broadcast.extras}
        self.extras = {name: torch.empty_like(value, device=device) for name, value in extras.items()}
        self.bank: objective.Features | None = None
        if recipe.bank is not None:
            self.bank = objective.Features(self.extras["bank.features"], self.extras["bank.labels"])
        self.queue = FeatureQueue(recipe.queue, self.net.encoder.features, device, self.lead) if recipe.queue else None
        self.prior = torch.zeros(*self.lead, broadcast.classes, device=device)
        self.fixed = recipe.alignment is not None and recipe.alignment.initial == "fixed"
        """Whether prototypes stay as they are."""
        variables: list[nn.Parameter] = []
        self.pace, clips_variables = 1.0, False
        if recipe.alignment is not None:
            start = torch.empty_like(broadcast.weights["prototypes"], device=device)
            self.aligner = Aligner(recipe, recipe.alignment, self.extras["anchors"], start, self.lead)
            variables = list(self.aligner.variables.values())
            self.pace, clips_variables = self.aligner.weight.pace()
        # The network, and λ's variables with a learning rate of their own.
        self.own_rate = torch.zeros((), device=device)
        momentum, adam = training.momentum, training.optimizer == "adam"
        self.optimizer = Adam(momentum) if adam else SGD(momentum, nesterov=training.nesterov)
        self.optimizer.add(list(self.net.parameters()), self.rate, training.weight_decay)
        self.optimizer.add(variables, self.own_rate)
        self.clipped = [*self.net.parameters(), *(variables if clips_variables else [])]
        self._begin_batches(self._images_per_step())
        stages: list[Stage | None] = [*recipe.objective.stages] or [None]
        self.stages = [self._stage(stage) for stage in stages]
        self.stage = self.stages[0]
        self._sent: Broadcast | None = None
        self._weights: dict[str, Tensor] = {}

    def _build(self, broadcast: Broadcast) -> PrototypeNet:
        recipe = broadcast.recipe
        return build(recipe.encoder, broadcast.shape[0], broadcast.classes, recipe.model.head)

    def _images_per_step(self) -> int:
        return self.training.views * self.training.batch_size

    def _stage(self, stage: Stage | None) -> StageSteps:
        terms = objective.active(self.recipe.objective, stage)
        aligns = self.aligner is not None and (stage is None or stage.align)
        names = ["loss", "base", *(["align"] if aligns else []), *terms, "gradient_norm"]
        return StageSteps(terms, aligns, names, torch.zeros(len(names), *self.lead, device=self.device), self.records)

    # --- broadcasts, clients and epochs take turns: values change, addresses stay -----------------------------------------

    def bind(self, broadcast: Broadcast) -> None:
        """Copy a broadcast's weights, initial prototypes, anchors, bank and reference into the buffers."""
        if self._sent is not broadcast:  # for the next clients its weights stay on the device
            self._sent = broadcast
            self._weights = {name: value.to(self.device) for name, value in broadcast.weights.items()}
            self.net.load_state_dict(self._weights)
        else:
            overwrite(self.net.state_dict(), self._weights)
        if self.shared_base is not None:
            self.shared_base.bind(self._weights)
        self._bind_extras(broadcast)

    def _bind_extras(self, broadcast: Broadcast) -> None:
        for name, buffer in self.extras.items():
            buffer.copy_(broadcast.extras[name])
        if self.aligner is not None:
            self.aligner.start.copy_(broadcast.weights["prototypes"])

    def begin_client(self, counts: Tensor) -> None:
        super().begin_client(counts)
        self.prior.copy_(objective.log_prior(counts))
        for stage in self.stages:
            stage.sums.zero_()  # the client before may have failed within an epoch

    def begin_epoch(self, epoch: int, consensus: float) -> None:
        """Prepare an epoch (from 0) of the whole training."""
        self.net.train()
        self.stage = self.stages[objective.stage_of(self.recipe.objective, epoch, self.recipe.training_epochs)]
        if self.training.restart_optimizer:
            self.restart()
        if self.aligner:
            self.aligner.begin_epoch(epoch, consensus)
        if self.queue:
            self.queue.begin_epoch(epoch)

    # --- steps -----------------------------------------------------------------------------------------------------------

    def _set_rate(self, rate: float) -> None:
        super()._set_rate(rate)
        self.own_rate.fill_(rate * self.pace)

    def means(self, steps: int) -> dict[str, float]:
        """Mean metrics per step since the last call, and the spread of the last features; waits for the device."""
        assert self.last_batch is not None
        values = [self.stage.sums / steps, trace.spread(self.last_batch.unit)[None], *self._anchoring()]
        measured = torch.cat(values).tolist()
        self.stage.sums.zero_()
        return dict(zip(self._measured, measured, strict=True))

    @property
    def _measured(self) -> list[str]:
        """Names of an epoch's metrics."""
        return [*self.stage.names, "spread", *(trace.ANCHORING if self.aligner else ())]

    def _anchoring(self) -> list[Tensor]:
        """Where the prototypes are, as seen from their anchors, if there are anchors."""
        return [trace.anchoring(self.net.prototypes.detach(), self.aligner.anchors)] if self.aligner else []

    def gradients(self) -> dict[str, Any]:
        """Norms and cosines of the terms' gradients on the last batch."""
        assert self.last_batch is not None
        return trace.gradients(
            self.stage.terms, self.last_batch, self.aligner.distance if self.aligner and self.stage.aligns else None
        )

    def _step(self, pixels: Tensor, labels: Tensor, numbers: Tensor) -> None:
        with torch.no_grad():
            dtype = torch.bfloat16 if self.bf16 and self.teacher is None else torch.float32
            inputs = self._arranged(views(pixels, numbers, self.training.augment, dtype))
            teacher_logits = self.teacher(inputs) if self.teacher else None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            features = self._by_client(self.encode(inputs).float())
        batch = objective.Batch(
            F.normalize(features, dim=-1),
            labels.view(*self.lead, -1),
            self.net.prototypes.detach() if self.fixed else self.net.prototypes,
            prior=self.prior,
            bank=self.bank,
            queue=self.queue.features if self.queue else None,
            reference=self.extras.get("reference.features"),
            teacher_logits=teacher_logits,
            lengths=None if self.net.bias is None else features.norm(dim=-1, keepdim=True),
            bias=self.net.bias,
        )
        base, values, alignment = self._losses(batch)
        total, measured = base, [base]
        if self.aligner is not None and alignment:
            floor, align = alignment
            total = self.aligner.weigh(base, floor, align)
            measured.append(align)
        self.optimizer.zero_grad()
        (total.sum() if self.lead else total).backward()  # a gradient given to `backward` loads sympy
        norm = self._clip()
        self.optimizer.step()
        self.stage.sums += torch.stack([total, *measured, *values.values(), norm]).detach()
        lengths = None if batch.lengths is None else batch.lengths.detach()
        self.last_batch = replace(batch, unit=batch.unit.detach(), lengths=lengths)
        if self.queue:
            self.queue.push(batch)

    def _arranged(self, images: Tensor) -> Tensor:
        """Images (n, …) as the encoder takes them."""
        return images.contiguous(memory_format=torch.channels_last)

    def _by_client(self, features: Tensor) -> Tensor:
        """What the encoder makes of them as (*lead, n, features)."""
        return features

    def _losses(self, batch: objective.Batch) -> Losses:
        base, values = objective.evaluate(self.stage.terms, batch)
        if self.aligner is None or not self.stage.aligns:
            return base, values, ()
        return base, values, (objective.floor(self.stage.terms, batch), self.aligner.distance(batch))

    def _clip(self) -> Tensor:
        """Clip the gradient; its norm before."""
        return clip_grad_norm_(self.clipped, self.training.clip_norm or math.inf)
