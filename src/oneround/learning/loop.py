"""The training loop: every network in the program that learns, learns here.

Data lives on the device; a step gathers a batch, makes views of it, encodes them in one pass and descends. Nothing is
read back from the device within an epoch. State is saved between epochs, so a killed client goes on from its last one.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oneround.data import Images
from oneround.data.augment import draw
from oneround.errors import OutOfTime, RunError
from oneround.learning import rails
from oneround.learning.alignment import instability_threshold
from oneround.learning.batches import batches
from oneround.learning.companion import Companion, companions
from oneround.learning.memory import log_prior
from oneround.learning.objective import stage_of
from oneround.learning.step import Stepper
from oneround.models.prototype import on_cpu
from oneround.protocol import Broadcast, blob
from oneround.sections import Training
from oneround.seeds import generator
from oneround.site import Site

log = logging.getLogger("oneround")
Emit = Callable[[dict[str, Any]], None]


def silent(event: dict[str, Any]) -> None:
    """Nobody is watching; trouble is logged all the same."""
    if event["event"] == "trouble":
        log.warning(event["text"])


class Learner:
    """One site's local training: the network, how far it is, and what it measured. One at a time per device."""

    def __init__(
        self,
        broadcast: Broadcast,
        site: Site,
        emit: Emit = silent,
        teacher: Callable[[Tensor], Tensor] | None = None,
        batch_key: str = "training.batch_size",
    ) -> None:
        """`teacher`: whose answers a term copies; `batch_key`: what the recipe calls the batch size, should it not fit."""
        if site.data is None or len(site.data) == 0:
            raise RunError(f"{site.name}: no data to train on")
        self.broadcast, self.site, self.emit, self.batch_key = broadcast, site, emit, batch_key
        self.recipe, self.training, self.seed = (
            broadcast.recipe,
            broadcast.recipe.training,
            broadcast.recipe.seeds.training,
        )
        self.data: Images = site.data.to(site.device)
        self.counts = self.data.class_counts(broadcast.classes)
        self.stepper = _stepper(broadcast, site, teacher)
        self.net, self.aligner = self.stepper.net, self.stepper.aligner
        self.epoch = broadcast.first_epoch
        """How many epochs of the whole training are over; a round begins where the last one ended."""
        self.history: list[dict[str, Any]] = []
        self.stopped: str | None = None
        """Why training ended before its time."""
        self.companion = self._companion()
        self.stepper.prior.copy_(log_prior(self.counts))
        if not self._resume():
            self.net.load_state_dict(broadcast.weights)
            self.stepper.restart()
            if self.stepper.queue:
                self.stepper.queue.clear()
            if self.aligner:
                self.aligner.begin_client(self.counts)

    def _companion(self) -> Companion | None:
        part = self.recipe.companion
        return companions.of(part).join(self.broadcast, self.site) if part is not None else None

    def train(self, until: int) -> None:
        """Train to the end of epoch `until`, saving state on the way; less far if the recipe's rails say stop."""
        saved = time.monotonic()
        while self.epoch < until and not self.stopped:
            before = {name: tensor.clone() for name, tensor in self._learned().items()}
            try:
                measured = self._run_epoch()
            except torch.OutOfMemoryError:
                measured = None  # what the failed step held is freed when this block ends
            if measured is None:
                raise RunError(self._does_not_fit())
            if not self._on_rails(measured, before):
                continue
            self.epoch += 1
            self.history.append(measured)
            self.emit({"event": "epoch", "client": self.site.name, **measured})
            late = self.site.deadline is not None and time.time() >= self.site.deadline and self.epoch < until
            due = late or self.epoch == until or time.monotonic() - saved >= self.site.local.checkpoint_seconds
            if due and self.epoch < self.broadcast.last_epoch:  # afterwards the upload takes the state's place
                self.save()
                saved = time.monotonic()
            if late:
                raise OutOfTime(
                    f"{self.site.name}: stopped after epoch {self.epoch}, the time is over; resume to go on"
                )

    def _on_rails(self, measured: dict[str, Any], before: dict[str, Tensor]) -> bool:
        """Whether the epoch counts; one that ended without finite numbers is undone."""
        features = self.net.prototypes.shape[1]
        trouble = rails.look(self.recipe, measured, instability_threshold(self.recipe, len(self.counts), features))
        if trouble is None:
            return True
        known = any(trouble.kind in entry.get("trouble", ()) for entry in self.history)
        measured["trouble"] = [trouble.kind]
        text, action = f"{self.site.name}, {trouble.text}", self.recipe.rails.on_explosion
        undone = trouble.kind == "not-finite"
        if undone:
            self.stepper.restart()
            for name, held in self._learned().items():
                held.copy_(before[name])
        if action == "clamp" and self.aligner and trouble.kind != "weight" and float(self.aligner.ceiling) > 0:
            self.aligner.ceiling.zero_()
            text += "; its alignment is dropped from here"
        elif action == "clamp" and trouble.kind == "weight":
            text += "; held there from here"
        elif action == "stop" or undone:
            kept = measured["epoch"] - undone
            self.stopped = text = f"{text}; stopped" + (
                f", what it learned to the end of epoch {kept} is kept" * (kept > 0)
            )
        if not known:
            self.emit({"event": "trouble", "text": text})
        return not undone

    def _learned(self) -> dict[str, Tensor]:
        """All that training changes; live, not a copy."""
        own = {f"alignment.{name}": value for name, value in self.aligner.live.items()} if self.aligner else {}
        queue = self.stepper.queue.live if self.stepper.queue else {}
        kept = own | {f"queue.{name}": value for name, value in queue.items()}
        return {f"net.{name}": value for name, value in self.net.state_dict().items()} | kept

    def _does_not_fit(self) -> str:
        wanted, fits, key = self.training.batch_size, self.stepper.largest_batch(), self.batch_key
        if self.companion:
            fits = min(fits, self.companion.largest_batch())
        fix = f"{fits} would (--set {key}={fits})" if fits else "not even 1 would; take a smaller encoder"
        return f"{self.site.name}: {key} = {wanted} does not fit into the memory of {self.site.device}; {fix}"

    def _run_epoch(self) -> dict[str, Any]:
        start = told = time.monotonic()
        device, training, who = self.site.device, self.training, (self.site.name, self.epoch)
        plan = batches(self.data.labels.cpu(), training, generator(self.seed, *who, "shuffle"))
        random = generator(self.seed, *who, "augment")
        # All views of a batch go in one pass. Everything random is drawn on the CPU: every device makes the same views.
        views, epochs = training.views, self.recipe.epochs
        sizes = [views * len(index) for index in plan]
        drawn = [draw(len(index), random, per_batch=training.augment.per_batch) for index in plan for _ in range(views)]
        numbers = torch.cat(drawn).to(device).split(sizes)
        chosen = torch.cat([index.repeat(views) for index in plan]).to(device).split(sizes)
        rate, consensus = 0.0, self.site.told.get("consensus", 1.0)
        self.net.train()
        self.stepper.enter(stage_of(self.recipe.objective, self.epoch, epochs))
        if training.restart_optimizer:
            self.stepper.restart()
        if self.aligner:
            self.aligner.begin_epoch(self.epoch, epochs, consensus)
        if self.stepper.queue:
            self.stepper.queue.begin_epoch(self.epoch)
        with self.stepper.working():
            for step, index in enumerate(chosen):
                rate = learning_rate(training, self.epoch + step / len(plan), epochs)
                batch = self.data.pixels[index], self.data.labels[index], numbers[step], rate
                self.stepper(*batch)
                if self.companion:
                    last = step + 1 == len(plan) and self.epoch + 1 == self.broadcast.last_epoch
                    self.companion.after_step(self.net, *batch, last)
                if time.monotonic() - told > 0.2:
                    told = time.monotonic()
                    done = {"epoch": self.epoch + 1, "done": step + 1, "of": len(plan)}
                    self.emit({"event": "steps", "client": self.site.name, **done})
            measured: dict[str, Any] = {"epoch": self.epoch + 1, "steps": len(plan), "learning_rate": rate}
            measured |= self.stepper.means(len(plan)) | (self.companion.report() if self.companion else {})
            if self._traced(len(plan)):
                measured["gradients"] = self.stepper.gradients()
        measured["classes_seen"] = int((self.counts > 0).sum())
        if self.aligner:
            measured |= self.aligner.report(self.epoch, epochs, consensus)
        return {**measured, "seconds": time.monotonic() - start}

    def _traced(self, steps: int) -> bool:
        """Whether the end of this epoch is a moment to look at gradients: once in so many steps, and at the very end."""
        every = self.recipe.trace.every
        if not every:
            return False
        done = self.epoch * steps
        return self.epoch == 0 or self.epoch + 1 == self.recipe.epochs or done // every != (done + steps) // every

    # --- state that survives a kill ----------------------------------------------------------------------------------

    @property
    def _path(self) -> Path | None:
        return self.site.folder / "state.safetensors" if self.site.folder else None

    def save(self) -> None:
        """Write the state durably, in place of the last one."""
        if self._path is None:
            return
        tensors = {name: on_cpu(value) for name, value in self._learned().items()}
        if not self.training.restart_optimizer:
            tensors |= {f"momentum.{name}": on_cpu(held) for name, held in self.stepper.momentum.items()}
        if self.companion:
            tensors |= {f"companion.{name}": value for name, value in self.companion.state().items()}
        said = {"client": self.site.name, "recipe_digest": self.broadcast.digest, "epoch": self.epoch}
        raw = blob.pack("state", tensors, {**said, "history": self.history})
        blob.write_durably(self._path, raw, flush=False)

    def _resume(self) -> bool:
        if self._path is None or not self._path.is_file():
            return False
        manifest, tensors = blob.read(self._path, "state")
        if (manifest["client"], manifest["recipe_digest"]) != (self.site.name, self.broadcast.digest):
            raise RunError(f"{self._path}: state of another client or recipe; remove it to begin anew")
        parts: dict[str, dict[str, Tensor]] = {"net": {}, "momentum": {}, "alignment": {}, "queue": {}, "companion": {}}
        for name, tensor in tensors.items():
            part, _, key = name.partition(".")
            parts[part][key] = tensor
        if not self.broadcast.first_epoch < int(manifest["epoch"]) <= self.broadcast.last_epoch:
            return False  # of another round
        self.net.load_state_dict(parts["net"])
        self.stepper.restart(parts["momentum"])
        if self.aligner:
            self.aligner.load(parts["alignment"], self.counts)
        if self.companion:
            self.companion.load(parts["companion"])
        for name, kept in self.stepper.queue.live.items() if self.stepper.queue else ():
            kept.copy_(parts["queue"][name])
        self.epoch, self.history = int(manifest["epoch"]), list(manifest["history"])
        return True


def learning_rate(training: Training, epoch: float, epochs: int) -> float:
    """After so many epochs (with a fraction for steps) of a whole training of that many."""
    if training.schedule == "cosine":
        return training.learning_rate * (1 + math.cos(math.pi * epoch / epochs)) / 2
    passed = sum(epoch % training.epochs >= milestone for milestone in training.milestones)
    return training.learning_rate * training.factor**passed


_held: dict[Any, Stepper] = {}


def _stepper(broadcast: Broadcast, site: Site, teacher: Callable[[Tensor], Tensor] | None) -> Stepper:
    """The one stepper of this process: clients that train one after another share its network and its recording."""
    local, device = site.local, site.device
    key = (
        broadcast.digest,
        broadcast.classes,
        broadcast.shape,
        device,
        site.bf16,
        local.compile,
        local.record,
        teacher,
    )
    if key not in _held:
        _held.clear()
        gc.collect()  # the old one's recording holds device memory until it is really gone
        if device.type == "cuda":
            torch.cuda.empty_cache()
        _held[key] = Stepper(
            broadcast, device, bf16=site.bf16, compiled=local.compile, recorded=local.record, teacher=teacher
        )
    return _held[key]
