"""The training loop of every network, at the clients and at the server.

Data lives on the device; a step gathers a batch, augments it, encodes all views in one pass and updates the weights. Nothing is
read back from the device within an epoch. State is saved between epochs, so a killed client resumes from the last saved one.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from oneround import kernels
from oneround.config.sections import Training
from oneround.data import Images
from oneround.data.augment import columns_of, draw
from oneround.errors import OutOfTime, RunError
from oneround.models.prototype import PrototypeNet
from oneround.protocol import Broadcast, blob
from oneround.protocol.encoding import layout_of
from oneround.protocol.messages import prefixed, split_by_prefix
from oneround.seeds import generator
from oneround.site import Site
from oneround.training import safeguards
from oneround.training.alignment.aligner import instability_threshold
from oneround.training.batched_step import BatchedStepper
from oneround.training.batches import batches
from oneround.training.copies import copies, overwrite
from oneround.training.flow_matching import FlowStep
from oneround.training.idle import IdleStates, State, write_state
from oneround.training.shared_base import SHARED, depth_of
from oneround.training.step import ClientState, RecordedStep, Stepper, searching, unrecorded

log = logging.getLogger("oneround")
Emit = Callable[[dict[str, Any]], None]
PEAK = 0.2
"""Of the schedule `triangular`: after which share of the training its rate is highest."""


def silent(event: dict[str, Any]) -> None:
    """Default callback: log warnings, drop everything else."""
    if event["event"] == "trouble":
        log.warning(event["text"])


class Companion(Protocol):
    """A second network that trains beside a client's and may change its weights (mergenet/companion.py)."""

    def after_step(
        self, net: PrototypeNet, pixels: Tensor, labels: Tensor, numbers: Tensor, rate: float, last: bool
    ) -> None:
        """Called after a step on this batch (all views) at this learning rate; `last`: the last step of the training."""
        ...

    def largest_batch(self) -> int:
        """After an out-of-memory error: the largest batch size that fits; 0 if none."""
        ...

    def report(self) -> dict[str, float]:
        """Metrics since the last call."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Its state between epochs."""
        ...

    def load(self, state: dict[str, Tensor]) -> None: ...


class Learner:
    """One site's local training of the network that classifies: the network, its epoch and its metrics. One at a time per trainer.

    Another network (generator.py) has another step, rate and random numbers; everything else is the same.
    """

    network: str | None = None
    """Its name, where it is not the network that classifies; its state and its random numbers are named after it."""

    def __init__(
        self,
        broadcast: Broadcast,
        site: Site,
        emit: Emit = silent,
        trainer: Trainer | None = None,
        teacher: Callable[[Tensor], Tensor] | None = None,
        companion: Companion | None = None,
        batch_key: str = "training.batch_size",
        slot: ClientState | None = None,
    ) -> None:
        """Resume from the state in the site's folder, or start from the broadcast.

        `trainer`: the worker's own; `teacher`: its scores are the targets of distillation; `companion`: trains beside the
        network; `batch_key`: the recipe's key of the batch size, for the message when it does not fit; `slot`: its part of a batched
        step, where it is trained together with other clients (batched_loop.py).
        """
        if not site.data:
            raise RunError(f"{site.name}: no data to train on")
        self.broadcast, self.site, self.emit, self.batch_key = broadcast, site, emit, batch_key
        self.recipe, self.training = broadcast.recipe, self._training
        self.idle = trainer.idle if trainer else None
        self.data: Images = site.data.to(site.device)
        self._labels = site.data.labels.cpu()
        self.counts = site.data.class_counts(broadcast.classes)
        if slot is None:
            slot = self.stepper = self._bind(trainer or Trainer(), teacher)
        self.state = slot
        self.companion = companion
        self.epoch = self.first = broadcast.first_epoch + self._epochs_before
        """Number of completed epochs of the whole training; a round continues where the last one ended."""
        self.history: list[dict[str, Any]] = []
        self.stopped = ""
        """Why training stopped early, with figures: for this site only; empty if it did not."""
        self.stopped_summary = ""
        """The same without figures that depend on the site's class counts."""
        self.last = self.first + self.training.epochs
        self.state_file = site.folder / f"{self.network or 'state'}.safetensors" if site.folder else None
        self._ahead: tuple[int, list[tuple[Tensor, Tensor]]] | None = None
        """The batches of an epoch (from 0) that were drawn while the device was busy with the one before."""
        self.state.begin_client(self.counts)
        self.depth = depth_of(broadcast, site.name, self.counts)
        """Number of blocks it shares; None where the recipe has no split to train under."""
        if self.depth is not None:
            assert isinstance(self.stepper, Stepper) and self.stepper.shared_base is not None
            self.stepper.shared_base.begin(self.depth)
        self._resume()
        self._saved = time.monotonic()

    # --- what another network has otherwise --------------------------------------------------------------------------------

    @property
    def net(self) -> PrototypeNet:
        """The network that classifies."""
        assert isinstance(self.state.net, PrototypeNet)
        return self.state.net

    @property
    def _training(self) -> Training:
        """How an epoch is cut into batches, and how many epochs there are."""
        return self.broadcast.recipe.training

    @property
    def _epochs_before(self) -> int:
        """Epochs of networks that train before this one."""
        return 0

    def _bind(self, trainer: Trainer, teacher: Callable[[Tensor], Tensor] | None) -> RecordedStep:
        return trainer.bind(self.broadcast, self.site, teacher)

    def _numbers(self, samples: int, random: torch.Generator) -> Tensor:
        """Random numbers of a view of each sample."""
        augment = self.training.augment
        return draw(samples, random, per_batch=augment.per_batch, columns=columns_of(augment))

    def _rate(self, step: int, steps: int) -> float:
        """The learning rate of a step of this epoch, from 0."""
        return learning_rate(self.training, self.epoch + step / steps, self.recipe.training_epochs)

    def _check_epoch(self, metrics: dict[str, Any]) -> safeguards.Trouble | None:
        threshold = instability_threshold(self.recipe, *self.broadcast.weights["prototypes"].shape)
        return safeguards.check_epoch(self.recipe, metrics, threshold)

    # --- the loop ----------------------------------------------------------------------------------------------------------

    def train(self, until: int) -> None:
        """Train to the end of epoch `until`, or to its last; saves state on the way; a safeguard may stop it earlier."""
        until = min(until, self.last)
        while self.epoch < until and not self.stopped:
            before = copies(self.state.learned)
            try:
                metrics = self._run_epoch(until)
            except torch.OutOfMemoryError:
                metrics = None  # memory of the failed step is freed when this block ends
            if metrics is None:
                raise RunError(self._out_of_memory_message())
            self.end_epoch(metrics, before, until)

    def end_epoch(self, metrics: dict[str, Any], before: dict[str, Tensor], until: int) -> None:
        """Count an epoch that passes the safeguards and save state when it is due; `before`: what was learned before it."""
        if not self._passes_safeguards(metrics, before):
            return
        self.epoch += 1
        self.history.append(metrics)
        self.emit({"event": "epoch", "client": self.site.name, **metrics})
        late = self.site.deadline is not None and time.time() >= self.site.deadline and self.epoch < until
        due = late or self.epoch == until or time.monotonic() - self._saved >= self.site.local.checkpoint_seconds
        if due and self.epoch < self.broadcast.last_epoch:  # afterwards the upload replaces the state
            self.save()
            self._saved = time.monotonic()
        elif due and self.idle and self.state_file:
            self.idle.forget(self.state_file)
        if late:
            raise OutOfTime(f"{self.site.name}: stopped after epoch {self.epoch}, the time is over; resume to go on")

    def _passes_safeguards(self, metrics: dict[str, Any], before: dict[str, Tensor]) -> bool:
        """Whether the epoch counts; an epoch whose loss is not finite is undone."""
        trouble = self._check_epoch(metrics)
        if trouble is None:
            return True
        reported = any(trouble.kind in entry.get("trouble", ()) for entry in self.history)
        metrics["trouble"] = [trouble.kind]
        text, action = f"{self.site.name}, {trouble.text}", self.recipe.safeguards.on_explosion
        aligner, undone = self.state.aligner, trouble.kind == "not-finite"
        if undone:
            self.state.restart()
            self._restore(before)
        if action == "clamp" and trouble.kind == "weight":
            text += "; λ is clamped to the limit from now on"
        elif action == "clamp" and aligner and float(aligner.ceiling) > 0:
            aligner.ceiling.zero_()
            text += "; its alignment is switched off from now on"
        elif action == "stop" or undone:
            completed = metrics["epoch"] - undone
            ending = "; stopped" + f", its weights after epoch {completed} are kept" * (completed > 0)
            self.stopped = text = f"{text}{ending}"
            self.stopped_summary = f"{self.site.name}, {trouble.summary}{ending}"
        if not reported:
            self.emit({"event": "trouble", "text": text})
        return not undone

    def _restore(self, learned: dict[str, Tensor]) -> None:
        overwrite(self.state.learned, learned)

    def _out_of_memory_message(self) -> str:
        fits, key = self.stepper.largest_batch(), self.batch_key
        if self.companion:
            fits = min(fits, self.companion.largest_batch())
        fix = f"{fits} would (--set {key}={fits})" if fits else "not even 1 would; take a smaller encoder"
        return f"{self.site.name}: {key} = {self.training.batch_size} does not fit into the memory of {self.site.device}; {fix}"

    def _run_epoch(self, until: int) -> dict[str, Any]:
        start = reported = time.monotonic()
        drawn, self._ahead = self._ahead, None
        plan = drawn[1] if drawn and drawn[0] == self.epoch else self._draw_batches(self.epoch)
        rate = 0.0
        aligner, consensus = self.state.aligner, self.site.consensus
        self.stepper.begin_epoch(self.epoch, consensus)
        with self.stepper.stream_context():
            for step, (index, numbers) in enumerate(plan):
                rate = self._rate(step, len(plan))
                batch = self.data.pixels.index_select(0, index), self.data.labels[index], numbers, rate
                self.stepper(*batch)
                if self.companion:
                    last = step + 1 == len(plan) and self.epoch + 1 == self.broadcast.last_epoch
                    with searching(self.site.local):
                        self.companion.after_step(self.net, *batch, last)
                if time.monotonic() - reported > 0.2:
                    reported = time.monotonic()
                    done = {"epoch": self.epoch + 1, "done": step + 1, "of": len(plan)}
                    self.emit({"event": "steps", "client": self.site.name, **done})
            if self.epoch + 1 < until:
                self._ahead = self.epoch + 1, self._draw_batches(self.epoch + 1)
            means = self.stepper.means(len(plan)) | (self.companion.report() if self.companion else {})
            gradients = self.stepper.gradients() if self.traced(len(plan)) else None
        alignment = aligner.report(self.epoch, consensus) if aligner else {}
        return self.metrics(len(plan), rate, means, gradients, alignment, time.monotonic() - start)

    def metrics(
        self,
        steps: int,
        rate: float,
        means: dict[str, float],
        gradients: dict[str, Any] | None,
        alignment: dict[str, float],
        seconds: float,
    ) -> dict[str, Any]:
        """The metrics of an epoch, as the log has them."""
        metrics: dict[str, Any] = {"epoch": self.epoch + 1, "steps": steps, "learning_rate": rate, **means}
        if gradients is not None:
            metrics["gradients"] = gradients
        shared = {} if self.depth is None else {SHARED: self.depth}
        named = {"network": self.network} if self.network else {}
        return {
            **metrics,
            **named,
            "classes_seen": int((self.counts > 0).sum()),
            **shared,
            **alignment,
            "seconds": seconds,
        }

    def _draw_batches(self, epoch: int) -> list[tuple[Tensor, Tensor]]:
        """Sample indices and random numbers of every batch of an epoch on the device, all views of a batch in one pass."""
        indices, numbers, sizes = self.draw(epoch)
        device = self.site.device
        return list(zip(indices.to(device).split(sizes), numbers.to(device).split(sizes), strict=True))

    def draw(self, epoch: int) -> tuple[Tensor, Tensor, list[int]]:
        """Sample indices and random numbers of an epoch (from 0), one batch after another, and the batches' sizes, all views.

        They are drawn on the CPU, so every device makes the same views.
        """
        seed, views = self.recipe.seeds.training, self.training.views
        name = f"{self.site.name}/{self.network}" if self.network else self.site.name
        named = name, epoch - self._epochs_before
        plan = batches(self._labels, self.training, generator(seed, *named, "shuffle"))
        random, sizes = generator(seed, *named, "augment"), [views * len(index) for index in plan]
        numbers = torch.cat([self._numbers(len(index), random) for index in plan for _ in range(views)])
        return torch.cat([index.repeat(views) for index in plan]), numbers, sizes

    def traced(self, steps: int) -> bool:
        """Whether to record gradients at the end of this epoch: every `trace.every` steps, and after the first and last epoch."""
        every = self.recipe.trace.every
        if not every:
            return False
        done = self.epoch * steps
        return (
            self.epoch == 0 or self.epoch + 1 == self.recipe.training_epochs or done // every != (done + steps) // every
        )

    # --- state that survives a kill ----------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the state, replacing the last one."""
        if self.state_file is None:
            return
        momentum = {} if self.training.restart_optimizer else self.state.momentum
        companion = self.companion.state() if self.companion else {}
        tensors = self.state.learned | prefixed(momentum=momentum, companion=companion)
        manifest = {
            "client": self.site.name,
            "recipe_digest": self.broadcast.digest,
            "epoch": self.epoch,
            "history": list(self.history),
        }
        if self.idle:
            self.idle.keep(self.state_file, manifest, tensors, self.site.local.checkpoint_seconds)
        else:
            write_state(self.state_file, State(manifest, tensors))

    def _resume(self) -> None:
        """Load the saved state, if there is one of this round."""
        if self.state_file is None:
            return
        kept = self.idle.get(self.state_file) if self.idle else None
        if kept is None and not self.state_file.is_file():
            return
        manifest, tensors = kept or blob.read(self.state_file, "state")
        if (manifest["client"], manifest["recipe_digest"]) != (self.site.name, self.broadcast.digest):
            raise RunError(f"{self.state_file}: state of another client or recipe; remove it to start over")
        if not self.first < int(manifest["epoch"]) <= self.last:
            return
        saved = split_by_prefix(tensors, "momentum", "companion")
        self._restore(tensors)
        self.state.restart(saved["momentum"])
        if self.companion:
            self.companion.load(saved["companion"])
        self.epoch, self.history = int(manifest["epoch"]), list(manifest["history"])


def learning_rate(training: Training, epoch: float, epochs: int) -> float:
    """The learning rate after `epoch` (fractional within an epoch) of `epochs` in the whole training."""
    if training.schedule == "cosine":
        return training.learning_rate * (1 + math.cos(math.pi * epoch / epochs)) / 2
    if training.schedule == "triangular":
        done = epoch / epochs
        return training.learning_rate * min(done / PEAK, (1 - done) / (1 - PEAK))
    passed = sum(epoch % training.epochs >= milestone for milestone in training.milestones)
    return training.learning_rate * training.factor**passed


class Trainer:
    """A worker's networks and training steps at fixed addresses, bound to one broadcast at a time; clients take turns."""

    def __init__(self, idle: IdleStates | None = None) -> None:
        """`idle`: holds the states of the clients that wait; without it they are in files only."""
        self.idle = idle
        self._steps: dict[str, RecordedStep] = {}
        self._structures: dict[str, object] = {}

    def bind(self, broadcast: Broadcast, site: Site, teacher: Callable[[Tensor], Tensor] | None = None) -> Stepper:
        """The step with this broadcast's values in its buffers; rebuilt only if the recipe, sizes or device differ."""
        step = self._bind(broadcast, site, teacher, lambda: Stepper(broadcast, site, teacher))
        assert isinstance(step, Stepper)
        return step

    def bind_generator(self, broadcast: Broadcast, site: Site) -> FlowStep:
        """`bind` for the generator's step."""
        step = self._bind(broadcast, site, None, lambda: FlowStep(broadcast, site), "generator")
        assert isinstance(step, FlowStep)
        return step

    def bind_batched(self, broadcast: Broadcast, site: Site, clients: int, images: int) -> BatchedStepper:
        """The step of so many clients at once, each with so many images in a step, all views."""
        step = self._bind(broadcast, site, (clients, images), lambda: BatchedStepper(broadcast, site, clients, images))
        assert isinstance(step, BatchedStepper)
        return step

    def _bind(
        self,
        broadcast: Broadcast,
        site: Site,
        shape: object,
        make: Callable[[], RecordedStep],
        network: str = "",
    ) -> RecordedStep:
        """`shape`: what else the step depends on."""
        sizes = (broadcast.classes, broadcast.shape, layout_of(broadcast.extras))
        structure = (broadcast.digest, sizes, site.device, site.bf16, site.local.compile, site.local.record, shape)
        if self._structures.get(network) != structure:
            self._steps.pop(network, None)
            if site.device.type == "cuda":
                with unrecorded:
                    gc.collect()  # the old recording holds device memory until it is collected
                    torch.cuda.empty_cache()
            step = make()
            if site.device.type == "cuda" and kernels.rehearse(step.rehearse):
                step = make()
            self._steps[network], self._structures[network] = step, structure
        step = self._steps[network]
        step.bind(broadcast)
        return step
