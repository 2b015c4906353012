"""MergeNet between rounds: the average of the clients' networks is fused with a large network's parameters before the next round.

From `start_round` on, every `every` rounds, some matrices of the average pass through an adapter that attends to the teacher's
(mergenet/). The adapter learns from the next average: the result of the clients' training from the fused network. No training
follows the last round, so the final model is the plain average.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from oneround.config.parts import Needs
from oneround.config.recipe import Federated, Local
from oneround.config.sections import Count, Fraction
from oneround.data import Images
from oneround.data.augment import preprocessing
from oneround.errors import RunError
from oneround.fusion.average import Average, average_weights, single
from oneround.fusion.base import rules
from oneround.mergenet import (
    Adapter,
    Merger,
    Pair,
    Teacher,
    check_pairs,
    chosen_pairs,
    layout_of,
    not_finite,
    teacher_of,
)
from oneround.models import Inference, Single
from oneround.models.inference import to_inference
from oneround.models.prototype import all_on_cpu, network_from
from oneround.protocol import Broadcast, Upload
from oneround.site import Site
from oneround.training.server_side import read_state, write_state

log = logging.getLogger("oneround")
LOST_ADAPTER = (
    "it cannot be made again: remove broadcast.safetensors beside server/ and resume, then all rounds are trained again"
)


@rules.register("mergenet")
class MergeNet(Average):
    """The average, some of its matrices fused with a large network's by parameter attention."""

    teacher: Teacher = Teacher()
    adapter: Adapter = Adapter()
    pairs: list[Pair] = Field(default=[])
    """Which of the student's tensors attends to which of the teacher's; default: the published pair for MobileNetV2, the last
    convolution for other encoders, and the teacher's classifier."""
    start_round: Count = 2
    every: Annotated[int, Field(ge=0)] = 1
    """Fuse every so many rounds; 0: never, which is plain averaging."""
    accept_if: Fraction | None = None
    """A fused network whose accuracy on the server's validation images is lower than the average's by more than this share is not
    sent; default: always sent, as long as it is finite."""

    @property
    def needs(self) -> Needs:
        fuses = self.every > 0
        return super().needs | Needs(
            public=fuses and self.teacher.needs_public,
            validation=self.accept_if is not None,
            rounds=self.start_round + 1 if fuses else 1,
            state=True,
        )

    def check(self, broadcast: Broadcast, local: Local) -> None:
        if not self.every:
            return
        self.teacher.check(broadcast, local)
        check_pairs(chosen_pairs(self.pairs, broadcast), broadcast.weights, layout_of(self.teacher, broadcast))

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        averaged, number, last = average_weights(uploads), broadcast.round, broadcast.recipe.rounds
        if not self.every:
            return single(averaged, broadcast, server)
        facts: dict[str, Any] = {"round": number}
        if number < self.start_round:
            return single(averaged, broadcast, server, facts)
        due = number < last and (number - self.start_round) % self.every == 0
        fusions = 1 + (min(number, last - 1) - self.start_round) // self.every  # so far, this round included
        teacher_key = self.key(broadcast.recipe, "teacher.batch_size")
        teacher = teacher_of(self.teacher, broadcast, server, fusions, teacher_key)
        pairs, seed = chosen_pairs(self.pairs, broadcast), broadcast.recipe.seeds.initialisation
        merger = Merger(pairs, self.adapter, averaged, teacher, seed, server.device)
        if number > self.start_round:
            merger.load(read_state(self._state_path(server, number - 1), "adapter", broadcast, LOST_ADAPTER))
        metrics = merger.learn(averaged, number / last)
        fused = merger.fuse(averaged, teacher) if due else {}
        metrics |= merger.effect()
        facts |= {name: value for name, value in metrics.items() if math.isfinite(value)}
        sent = averaged
        if due:
            fused = all_on_cpu(fused)
            if self._accepts(fused, averaged, teacher, broadcast, server, facts):
                sent = fused
            if (first := broadcast.recipe.fusion[0]) != self:
                facts |= {"accepted": False, "reason": f"only scored: {first.label} comes first in fusion and goes out"}
        write_state(self._state_path(server, number), "adapter", merger.state(), broadcast)
        self._state_path(server, number - 2).unlink(missing_ok=True)
        return single(sent, broadcast, server, facts)

    def _teacher_accuracy(
        self, teacher: dict[str, Tensor], broadcast: Broadcast, server: Site, images: Images
    ) -> float:
        """Whether it knows more than the students."""
        net = network_from(self.teacher.encoder, broadcast.shape[0], broadcast.classes, teacher)
        return accuracy(to_inference(Single(net), server.device), images, broadcast.recipe, server.device)

    def _state_path(self, server: Site, number: int) -> Path:
        """Path of the adapter's state after a round; rules with other options have files of their own."""
        return server.state_folder(self) / f"adapter_{number:03d}.safetensors"

    def _accepts(
        self,
        fused: dict[str, Tensor],
        averaged: dict[str, Tensor],
        teacher: dict[str, Tensor],
        broadcast: Broadcast,
        server: Site,
        facts: dict[str, Any],
    ) -> bool:
        """Whether the fused network is sent; the reason goes to `facts` and the log."""
        if reason := not_finite(fused, self.adapter):
            facts["reason"] = reason
        elif server.validation:
            fused_accuracy, average_accuracy = (
                accuracy(single(weights, broadcast, server), server.validation, broadcast.recipe, server.device)
                for weights in (fused, averaged)
            )
            facts |= {"fused_validation": fused_accuracy, "average_validation": average_accuracy}
            facts["teacher_validation"] = self._teacher_accuracy(teacher, broadcast, server, server.validation)
            if self.accept_if is not None and fused_accuracy < average_accuracy - self.accept_if:
                facts["reason"] = f"{fused_accuracy:.4f} on validation images, the average {average_accuracy:.4f}"
        elif self.accept_if is not None:
            raise RunError(
                f"fusion.mergenet.accept_if = {self.accept_if:g}: the server holds no validation images; set validation, for example 0.1"
            )
        facts["accepted"] = accepted = "reason" not in facts
        if not accepted:
            log.warning("round %d: the fused network is not sent, the average is: %s", facts["round"], facts["reason"])
        return accepted


@torch.inference_mode()
def accuracy(model: Inference, images: Images, recipe: Federated, device: torch.device) -> float:
    """Share of correct predictions."""
    predictions = model.predict(images, device, *preprocessing(recipe)).argmax(1)
    return float((predictions.cpu() == images.labels.cpu()).double().mean())
