"""The training loop of several clients at once, epoch by epoch, each with its own shuffles, metrics, safeguards and state.

Every client is a `Learner` as when it trains alone; only its step is shared. Clients of one group have steps of equal shape. One
whose epoch is over idles until the longest is: the step goes on with its slot, and then it gets back what it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from oneround.config.sections import Training
from oneround.data import Images
from oneround.errors import OutOfTime, RunError
from oneround.protocol import Broadcast
from oneround.site import Site
from oneround.training.batched_step import BatchedStepper
from oneround.training.batches import steps_per_epoch
from oneround.training.copies import copies
from oneround.training.loop import Emit, Learner, Trainer, learning_rate, silent

StepShape = tuple[int, int, int]
"""Samples in a step, and in the last one of an epoch; steps in an epoch where they must agree, else 0."""


def step_shape(samples: int, training: Training) -> StepShape:
    """Clients whose step shapes are equal can be trained together."""
    steps, size = steps_per_epoch(samples, training), min(samples, training.batch_size)
    last = size if training.last_batch != "keep" else samples - (steps - 1) * size
    same_steps = last != size or training.schedule in ("cosine", "triangular")  # the rate changes with every step
    return size, last, steps if same_steps else 0


class Group:
    """Clients that are trained together, by slot; a slot without a client computes for nothing."""

    def __init__(
        self,
        broadcast: Broadcast,
        sites: Mapping[int, Site],
        slots: int,
        emit: Emit = silent,
        trainer: Trainer | None = None,
    ) -> None:
        first, training = next(iter(sites.values())), broadcast.recipe.training
        shapes = {step_shape(len(site.data or ()), training) for site in sites.values()}
        if len(shapes) > 1:
            raise ValueError(f"clients with steps of different shapes in one group: {sorted(shapes)}")
        ((size, _, _),) = shapes
        self.broadcast, self.emit = broadcast, emit
        self.stepper: BatchedStepper = (trainer or Trainer()).bind_batched(
            broadcast, first, slots, training.views * size
        )
        self.learners = {
            slot: Learner(broadcast, site, emit, trainer, slot=self.stepper.slots[slot]) for slot, site in sites.items()
        }
        self.images, self._starts = self._together()

    def _together(self) -> tuple[Images, list[int]]:
        """The images of all clients in one tensor, of which each client's own are a part, and where each begins."""
        learners = self.learners.values()
        images = Images(
            torch.cat([each.data.pixels for each in learners]), torch.cat([each.data.labels for each in learners])
        )
        sizes = [len(each.data) for each in learners]
        parts = zip(images.pixels.split(sizes), images.labels.split(sizes), strict=True)
        for learner, (pixels, labels) in zip(learners, parts, strict=True):
            learner.data = Images(pixels, labels)
        return images, [0, *accumulate(sizes[:-1])]

    def train(self, until: int) -> None:
        """Train all to the end of epoch `until`; one that repeats an epoch, or was resumed at an earlier one, catches up first."""
        while True:
            behind = {slot: each for slot, each in self.learners.items() if each.epoch < until and not each.stopped}
            if not behind:
                return
            epoch = min(each.epoch for each in behind.values())
            active = {slot: each for slot, each in behind.items() if each.epoch == epoch}
            before = copies(self.stepper.learned)
            try:
                metrics = self._run_epoch(active, epoch)
            except torch.OutOfMemoryError:
                raise RunError(
                    f"{len(self.learners)} clients with {self.stepper.images} images each do not fit into the memory of "
                    f"{self.stepper.device} in one step; start over with another --out and --set local.batched=false"
                ) from None
            out_of_time: OutOfTime | None = None
            for slot, learner in active.items():
                own = {name: tensor[slot] for name, tensor in before.items()}
                try:
                    learner.end_epoch(metrics[slot], own, until)
                except OutOfTime as error:
                    out_of_time = error  # the others save their states too
            if out_of_time is not None:
                raise out_of_time

    def _run_epoch(self, active: Mapping[int, Learner], epoch: int) -> dict[int, dict[str, Any]]:
        """Train these clients in an epoch (from 0), the others idle; their metrics by slot."""
        start = reported = time.monotonic()
        stepper, recipe = self.stepper, self.broadcast.recipe
        plan, steps = self._draw(active)
        consensus, rate = next(iter(active.values())).site.consensus, 0.0
        stepper.keep([slot for slot in range(stepper.clients) if slot not in active])
        stepper.begin_epoch(epoch, consensus)
        with stepper.stream_context():
            for done, (index, numbers) in enumerate(plan, start=1):
                rate = learning_rate(recipe.training, epoch + (done - 1) / len(plan), recipe.training_epochs)
                stepper(self.images.pixels.index_select(0, index), self.images.labels[index], numbers, rate)
                if done < len(plan):
                    stepper.keep([slot for slot, count in steps.items() if count == done], batch=True)
                if time.monotonic() - reported > 0.2:
                    reported = time.monotonic()
                    for slot, learner in active.items():
                        progress = {"epoch": epoch + 1, "done": min(done, steps[slot]), "of": steps[slot]}
                        self.emit({"event": "steps", "client": learner.site.name, **progress})
            stepper.give_back()
            means = stepper.all_means([steps.get(slot, 1) for slot in range(stepper.clients)])
            gradients = {
                slot: stepper.gradients_of(slot) for slot, learner in active.items() if learner.traced(steps[slot])
            }
        aligner = stepper.aligner.on_cpu() if stepper.aligner else None
        metrics = {}
        for slot, learner in active.items():
            alignment = aligner.client(slot).report(epoch, consensus) if aligner else {}
            share = (time.monotonic() - start) / len(active)
            metrics[slot] = learner.metrics(steps[slot], rate, means[slot], gradients.get(slot), alignment, share)
        return metrics

    def _draw(self, active: Mapping[int, Learner]) -> tuple[list[tuple[Tensor, Tensor]], dict[int, int]]:
        """Indices and numbers of every step, one slot after another, and every client's number of steps.

        A slot that idles gets what the client with the most steps gets.
        """
        drawn, steps = {}, {}
        starts = dict(zip(self.learners, self._starts, strict=True))
        for slot, learner in active.items():
            indices, numbers, sizes = learner.draw(learner.epoch)
            drawn[slot] = list(zip((indices + starts[slot]).split(sizes), numbers.split(sizes), strict=True))
            steps[slot] = len(sizes)
        longest = max(drawn.values(), key=len)
        by_step = []
        for step, idle in enumerate(longest):
            own = [drawn[slot][step] if step < steps.get(slot, 0) else idle for slot in range(self.stepper.clients)]
            by_step.append([torch.cat(each) for each in zip(*own, strict=True)])
        sizes, device = [len(index) for index, _ in by_step], self.stepper.device
        indices, numbers = (torch.cat(each).to(device).split(sizes) for each in zip(*by_step, strict=True))
        return list(zip(indices, numbers, strict=True)), steps
