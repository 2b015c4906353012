"""MergeNet on one machine: student and teacher, its companion, train side by side and are fused every few batches."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import torch
from torch import Tensor

from oneround.config.sections import Companion
from oneround.mergenet.merger import Merger, check_pairs, chosen_pairs
from oneround.mergenet.teacher import layout_of, network_of, teacher_recipe
from oneround.models import PrototypeNet
from oneround.protocol.messages import Broadcast, prefixed, split_by_prefix
from oneround.site import Site
from oneround.training.batches import steps_per_epoch
from oneround.training.step import Stepper

log = logging.getLogger("oneround")


def check_companion(options: Companion, broadcast: Broadcast) -> None:
    """Refuse options that do not fit the clients' network, before anything is trained."""
    check_pairs(chosen_pairs(options.pairs, broadcast), broadcast.weights, layout_of(options.teacher, broadcast))


class CompanionNetwork:
    """The teacher of one student, its optimiser and its adapters."""

    def __init__(self, options: Companion, broadcast: Broadcast, site: Site) -> None:
        assert site.data is not None
        self.options, self.steps, self.name, self.warned = options, 0, site.name, False
        training = broadcast.recipe.training
        steps = training.epochs * steps_per_epoch(len(site.data), training)
        if options.every >= steps:
            log.warning(
                f"{site.name}: companion.every = {options.every}: its training has {steps} steps, so the adapter is never applied"
            )
        recipe = teacher_recipe(broadcast.recipe, options.teacher, training.epochs, training.batch_size)
        fresh = network_of(options.teacher, broadcast).weights()
        initial = replace(broadcast, recipe=recipe, weights=fresh, extras={}, digest="")
        self.teacher = Stepper(initial, site)
        self.teacher.bind(initial)
        self.pace = options.teacher.learning_rate / training.learning_rate
        pairs = chosen_pairs(options.pairs, broadcast)
        seed = broadcast.recipe.seeds.initialisation
        self.merger = Merger(pairs, options.adapter, broadcast.weights, fresh, seed, site.device)
        self.step_metrics: list[dict[str, float]] = []

    def after_step(
        self, net: PrototypeNet, pixels: Tensor, labels: Tensor, numbers: Tensor, rate: float, last: bool
    ) -> None:
        self.teacher.net.train()
        self.teacher(pixels, labels, numbers, rate * self.pace)
        self.steps += 1
        if self.steps % self.options.every or last:
            return
        student, teacher = net.state_dict(), self.teacher.net.state_dict()
        metrics = self.merger.learn(student)
        if metrics:
            self.step_metrics.append(metrics)
        fused = self.merger.fuse(student, teacher)
        with torch.no_grad():
            for pair in self.merger.pairs:
                if bool(torch.isfinite(fused[pair.student]).all()):
                    student[pair.student].copy_(fused[pair.student])
                elif not self.warned:
                    self.warned = True
                    log.warning(
                        f"{self.name}: step {self.steps}: the fused {pair.student} is not finite and is not used; is"
                        f" companion.adapter.learning_rate = {self.options.adapter.learning_rate:g} too large?"
                    )

    def largest_batch(self) -> int:
        return self.teacher.largest_batch()

    def report(self) -> dict[str, float]:
        """The adapter's metrics: means over its steps since the last call, and the effect of the last fusion."""
        steps, self.step_metrics = self.step_metrics, []
        means = {key: sum(each[key] for each in steps) / len(steps) for key in (steps[0] if steps else ())}
        self.teacher.stage.sums.zero_()
        metrics = means | self.merger.effect()
        return {f"adapter_{key}": value for key, value in metrics.items() if math.isfinite(value)}

    def state(self) -> dict[str, Tensor]:
        teacher, momentum = self.teacher.net.state_dict(), self.teacher.momentum
        tensors = prefixed(merger=self.merger.state(), teacher=teacher, momentum=momentum)
        return tensors | {"steps": torch.tensor(self.steps)}

    def load(self, state: dict[str, Tensor]) -> None:
        parts = split_by_prefix(state, "merger", "teacher", "momentum")
        self.merger.load(parts["merger"])
        self.teacher.net.load_state_dict(parts["teacher"])
        self.teacher.restart(parts["momentum"])
        self.steps = int(state["steps"])
