"""MergeNet on one machine: student and teacher learn side by side, and every few batches the student looks at the teacher."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from oneround.learning.batches import steps_per_epoch
from oneround.learning.companion import Companion, CompanionPart, companions
from oneround.learning.step import Stepper
from oneround.mergenet.adapter import Adapter
from oneround.mergenet.merger import Merger, Pair, check_pairs, chosen_pairs
from oneround.mergenet.teacher import Larger, layout_of, network_of, teachers_recipe
from oneround.models import PrototypeNet
from oneround.models.prototype import on_cpu
from oneround.protocol import Broadcast
from oneround.sections import Count
from oneround.site import Site

log = logging.getLogger("oneround")


@companions.register("mergenet")
class Beside(CompanionPart):
    """A larger network that learns from the same batches and hands its knowledge over through an adapter."""

    teacher: Larger = Larger()
    """Its encoder and learning rate; it begins with random weights."""
    adapter: Adapter = Adapter()
    pairs: list[Pair] = Field(default=[])
    """As in the fusion rule `mergenet`."""
    every: Count = 10
    """Batches between two fusions."""

    def check(self, broadcast: Broadcast) -> None:
        check_pairs(chosen_pairs(self.pairs, broadcast), broadcast.weights, layout_of(self.teacher, broadcast))

    def join(self, broadcast: Broadcast, site: Site) -> Companion:
        return Together(self, broadcast, site)


class Together:
    """The teacher, its optimiser, and the adapter beside one student."""

    def __init__(self, options: Beside, broadcast: Broadcast, site: Site) -> None:
        self.options, self.device, self.steps, self.name, self.warned = options, site.device, 0, site.name, False
        assert site.data is not None
        steps = broadcast.recipe.training.epochs * steps_per_epoch(len(site.data), broadcast.recipe.training)
        if options.every >= steps:
            log.warning(
                "%s: companion.every = %d, and it takes %d steps in all: it learns alone",
                site.name,
                options.every,
                steps,
            )
        training = broadcast.recipe.training
        recipe = teachers_recipe(broadcast.recipe, options.teacher, training.epochs, training.batch_size)
        fresh = network_of(options.teacher, broadcast).weights()
        sent = replace(broadcast, recipe=recipe, weights=fresh, extras={})
        local = site.local
        self.teacher = Stepper(
            sent, self.device, bf16=site.bf16, compiled=local.compile, recorded=local.record, beside=True
        )
        self.teacher.net.load_state_dict(fresh)
        self.teacher.restart()
        self.pace = options.teacher.learning_rate / training.learning_rate
        pairs = chosen_pairs(options.pairs, broadcast)
        seed = broadcast.recipe.seeds.initialisation
        self.merger = Merger(pairs, options.adapter, broadcast.weights, fresh, seed, self.device)
        self.seen: list[dict[str, float]] = []

    def after_step(
        self, net: PrototypeNet, pixels: Tensor, labels: Tensor, numbers: Tensor, rate: float, last: bool
    ) -> None:
        self.teacher.net.train()
        self.teacher(pixels, labels, numbers, rate * self.pace)
        self.steps += 1
        if self.steps % self.options.every or last:
            return
        student, teacher = net.state_dict(), self.teacher.net.state_dict()
        learned = self.merger.learn(student)
        if learned:
            self.seen.append(learned)
        fused = self.merger.fuse(student, teacher)
        with torch.no_grad():
            for pair in self.merger.pairs:
                if bool(torch.isfinite(fused[pair.student]).all()):
                    student[pair.student].copy_(fused[pair.student])
                elif not self.warned:
                    self.warned = True
                    rate = self.options.adapter.learning_rate
                    log.warning(
                        "%s: step %d: what fusing made of %s is not finite, the student goes on without it; is "
                        "companion.adapter.learning_rate = %g too large?", self.name, self.steps, pair.student, rate,
                    )  # fmt: skip

    def largest_batch(self) -> int:
        return self.teacher.largest_batch()

    def report(self) -> dict[str, float]:
        told = {
            f"adapter_{key}": sum(each[key] for each in self.seen) / len(self.seen) for key in (self.seen or [{}])[0]
        }
        told |= {f"adapter_{key}": value for key, value in self.merger.effect().items()}
        self.seen = []
        self.teacher.now.sums.zero_()
        return {key: value for key, value in told.items() if math.isfinite(value)}

    def state(self) -> dict[str, Tensor]:
        told = {f"merger.{name}": value for name, value in self.merger.state().items()}
        told |= {f"teacher.{name}": on_cpu(value) for name, value in self.teacher.net.state_dict().items()}
        told |= {f"momentum.{name}": on_cpu(value) for name, value in self.teacher.momentum.items()}
        return told | {"steps": torch.tensor(self.steps)}

    def load(self, told: Mapping[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {"merger": {}, "teacher": {}, "momentum": {}}
        for name, value in told.items():
            part, _, key = name.partition(".")
            if key:
                parts[part][key] = value
        self.merger.load(parts["merger"])
        self.teacher.net.load_state_dict(parts["teacher"])
        self.teacher.restart(parts["momentum"])
        self.steps = int(told["steps"])
