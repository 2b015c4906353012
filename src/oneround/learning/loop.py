"""The training loop: every network in the program that learns, learns here.

Data lives on the device; a step gathers a batch, makes two views of it, encodes them in one pass and descends. Nothing is
read back from the device within an epoch. State is saved between epochs, so a killed client goes on from its last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from oneround.data import Images
from oneround.data.augment import draw, views
from oneround.errors import RunError
from oneround.learning import objective
from oneround.learning.batches import batches, steps_per_epoch
from oneround.learning.memory import largest_batch
from oneround.models import PrototypeNet
from oneround.models.prototype import blank
from oneround.parts import Part
from oneround.protocol import Broadcast, blob
from oneround.recipe import Augment, Training
from oneround.seeds import generator
from oneround.site import Site

Emit = Callable[[dict[str, Any]], None]
COMPILE_PAYS = 1500  # steps in a run from which compiling (about half a minute) is won back on a GPU


class Learner:
    """One site's local training: the network, how far it is, and what it measured."""

    def __init__(self, broadcast: Broadcast, site: Site, emit: Emit = lambda event: None) -> None:
        if site.data is None or len(site.data) == 0:
            raise RunError(f"{site.name}: no data to train on")
        assert broadcast.recipe.model.encoder is not None
        self.broadcast, self.site, self.emit = broadcast, site, emit
        self.training, self.seed = broadcast.recipe.training, broadcast.recipe.seeds.training
        self.data: Images = site.data.to(site.device)
        self.bench = _bench(broadcast.recipe.model.encoder, broadcast.shape[0], broadcast.classes, str(site.device))
        self.net = self.bench.net
        self.epoch = 0
        self.history: list[dict[str, Any]] = []
        self.momentum: dict[str, Tensor] = {}
        self.compiled = self._compile_pays()
        if not self._resume():
            self.net.load_state_dict(broadcast.weights)

    def train(self, until: int) -> None:
        """Train to the end of epoch `until`, saving state on the way."""
        saved = time.monotonic()
        optimizer = self._optimizer()
        while self.epoch < until:
            if self.training.restart_optimizer:
                optimizer = self._optimizer()
            try:
                measured = self._run_epoch(optimizer)
            except torch.cuda.OutOfMemoryError:
                fits = largest_batch(self.net, self.broadcast, self.site)
                raise RunError(
                    f"{self.site.name}: training.batch_size = {self.training.batch_size} does not fit into the memory of "
                    f"{self.site.device}; about {fits} would (--set training.batch_size={fits})"
                ) from None
            self.epoch += 1
            self.history.append(measured)
            self.emit({"event": "epoch", "client": self.site.name, **measured})
            self.momentum = {} if self.training.restart_optimizer else self._momentum_of(optimizer)
            more_to_come = self.epoch < self.training.epochs  # after the last epoch the upload takes the state's place
            if more_to_come and (self.epoch == until or time.monotonic() - saved >= self.site.local.checkpoint_seconds):
                self.save()
                saved = time.monotonic()

    def _run_epoch(self, optimizer: torch.optim.SGD) -> dict[str, Any]:
        start, device, training = time.monotonic(), self.site.device, self.training
        who = (self.site.name, self.epoch)
        plan = batches(len(self.data), training, generator(self.seed, *who, "shuffle"))
        random = generator(self.seed, *who, "augment")
        # Both views of a batch go in one pass. Everything random is drawn on the CPU: every device makes the same views.
        sizes = [2 * len(index) for index in plan]
        chosen = torch.cat([index.repeat(2) for index in plan]).to(device)
        numbers = torch.cat(
            [draw(size // 2, random, per_batch=training.augment.per_batch) for size in sizes for _ in range(2)]
        ).to(device)
        sums: dict[str, Tensor] = {}
        told, rate = start, 0.0
        self.net.train()
        for step, (index, drawn) in enumerate(zip(chosen.split(sizes), numbers.split(sizes), strict=True)):
            rate = learning_rate(training, (self.epoch + step / len(plan)) / training.epochs)
            for group in optimizer.param_groups:
                group["lr"] = rate
            compiled = self.compiled and len(index) == 2 * training.batch_size
            with torch.no_grad():
                seen = self.bench.views(compiled)(self.data.pixels[index], drawn, training.augment)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.site.bf16):
                features = self.bench.encode(compiled)(seen.contiguous(memory_format=torch.channels_last))
            batch = objective.Batch(F.normalize(features.float(), dim=1), self.data.labels[index], self.net.prototypes)
            total, values = objective.evaluate(self.broadcast.recipe.objective, batch)
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            norm = clip_grad_norm_(self.net.parameters(), training.clip_norm or math.inf)
            optimizer.step()
            for name, value in {"loss": total, **values, "gradient_norm": norm}.items():
                sums[name] = sums.get(name, 0) + value.detach()
            if time.monotonic() - told > 0.2:
                told = time.monotonic()
                self.emit(
                    {"event": "steps", "client": self.site.name, "epoch": self.epoch, "done": step + 1, "of": len(plan)}
                )
        means = {name: float(value) / len(plan) for name, value in sums.items()}
        if not math.isfinite(means["loss"]):
            raise RunError(
                f"{self.site.name}: the loss is not finite in epoch {self.epoch + 1}; lower training.learning_rate "
                f"({training.learning_rate:g}) or training.clip_norm ({training.clip_norm:g}; 0 is no clipping)"
            )
        return {
            "epoch": self.epoch + 1, "steps": len(plan), "learning_rate": rate, **means, "seconds": time.monotonic() - start,
        }  # fmt: skip

    def _optimizer(self) -> torch.optim.SGD:
        optimizer = torch.optim.SGD(
            self.net.parameters(), lr=self.training.learning_rate, momentum=self.training.momentum,
            weight_decay=self.training.weight_decay, fused=self.site.device.type in ("cpu", "cuda"),
        )  # fmt: skip
        for name, parameter in self.net.named_parameters():
            if name in self.momentum:
                optimizer.state[parameter]["momentum_buffer"] = self.momentum[name].to(parameter.device)
        return optimizer

    def _momentum_of(self, optimizer: torch.optim.SGD) -> dict[str, Tensor]:
        held = (
            (name, optimizer.state[parameter].get("momentum_buffer")) for name, parameter in self.net.named_parameters()
        )
        return {name: buffer for name, buffer in held if buffer is not None}

    def _compile_pays(self) -> bool:
        wanted = self.site.local.compile
        steps = steps_per_epoch(len(self.data), self.training) * self.training.epochs
        return wanted == "on" or (wanted == "auto" and self.site.device.type == "cuda" and steps >= COMPILE_PAYS)

    # --- state that survives a kill ------------------------------------------------------------------------------------

    @property
    def _path(self) -> Path | None:
        return self.site.folder / "state.safetensors" if self.site.folder else None

    def save(self) -> None:
        """Write the state durably, in place of the last one."""
        if self._path is None:
            return
        tensors = {f"net.{name}": value for name, value in self.net.weights().items()}
        tensors |= {f"momentum.{name}": value.cpu().contiguous() for name, value in self.momentum.items()}
        manifest = {
            "client": self.site.name,
            "recipe_digest": self.broadcast.digest,
            "epoch": self.epoch,
            "history": self.history,
        }
        blob.write_durably(self._path, blob.pack("state", tensors, manifest))

    def _resume(self) -> bool:
        if self._path is None or not self._path.is_file():
            return False
        manifest, tensors = blob.read(self._path, "state")
        if (manifest["client"], manifest["recipe_digest"]) != (self.site.name, self.broadcast.digest):
            raise RunError(f"{self._path}: state of another client or recipe; remove it to begin anew")
        split: dict[str, dict[str, Tensor]] = {"net": {}, "momentum": {}}
        for name, tensor in tensors.items():
            part, _, key = name.partition(".")
            split[part][key] = tensor
        self.net.load_state_dict(split["net"])
        self.momentum = split["momentum"]
        self.epoch, self.history = int(manifest["epoch"]), list(manifest["history"])
        return True


def learning_rate(training: Training, progress: float) -> float:
    """At `progress` (0…1) of the whole training."""
    if training.schedule == "constant":
        return training.learning_rate
    return training.learning_rate * (1 + math.cos(math.pi * progress)) / 2


class _Bench:
    """A network and its compiled functions, shared by the clients that take turns on one device."""

    def __init__(self, net: PrototypeNet) -> None:
        self.net = net
        self._encode: Callable[[Tensor], Tensor] | None = None
        self._views: Callable[[Tensor, Tensor, Augment], Tensor] | None = None

    def encode(self, compiled: bool) -> Callable[[Tensor], Tensor]:
        if compiled and self._encode is None:
            self._encode = torch.compile(self.net.encoder, dynamic=False)
        return self._encode if compiled and self._encode else self.net.encoder

    def views(self, compiled: bool) -> Callable[[Tensor, Tensor, Augment], Tensor]:
        if compiled and self._views is None:
            self._views = torch.compile(views, dynamic=False)
        return self._views if compiled and self._views else views


@lru_cache(maxsize=1)
def _bench(part: Part, channels: int, classes: int, device: str) -> _Bench:
    return _Bench(blank(part, channels, classes).to(torch.device(device), memory_format=torch.channels_last))  # type: ignore[call-overload]
