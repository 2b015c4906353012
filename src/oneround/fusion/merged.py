"""MergeNet between rounds: the average of the clients' networks looks at a large network's parameters before it goes out again.

From `start_round` on, every `every` rounds, some matrices of the average pass through an adapter that attends to the teacher's
(mergenet/). The adapter learns from the next average: that is where the clients' training took what it had handed out. After the
last round nobody trains any more, so the model is the plain average.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from oneround.data import Images
from oneround.errors import ProtocolError, RunError
from oneround.fusion.average import Average, average_weights, single
from oneround.fusion.rule import rules
from oneround.mergenet import Adapter, Merger, Pair, Teacher, check_pairs, chosen_pairs, layout_of, teacher_of
from oneround.models import Inference
from oneround.models.prototype import on_cpu
from oneround.protocol import Broadcast, Upload, blob
from oneround.protocol.model import preprocessing
from oneround.recipe import Federated, Local
from oneround.sections import Count, Fraction
from oneround.site import Site

log = logging.getLogger("oneround")


@rules.register("mergenet")
class MergeNet(Average):
    """The average, some of its matrices fused with a large network's by parameter attention."""

    between_rounds: ClassVar[bool] = True

    teacher: Teacher = Teacher()
    adapter: Adapter = Adapter()
    pairs: list[Pair] = Field(default=[])
    """Which of the student's tensors looks at which of the teacher's; left out: the published pair for MobileNetV2, the last
    convolution for other encoders, and the teacher's classifier."""
    start_round: Count = 2
    every: Annotated[int, Field(ge=0)] = 1
    """Fuse every so many rounds; 0: never, which is plain averaging."""
    accept_if: Fraction | None = None
    """A fused network whose accuracy on the server's validation images is lower than the average's by more than this share is not
    sent; left out: always sent, as long as it is finite."""

    @property
    def needs_public(self) -> bool:
        return self.every > 0 and self.teacher.needs_public

    @property
    def needs_validation(self) -> bool:
        return self.accept_if is not None

    def check(self, broadcast: Broadcast, local: Local) -> None:
        if not self.every:
            return
        self.teacher.check(broadcast, local)
        check_pairs(chosen_pairs(self.pairs, broadcast), broadcast.weights, layout_of(self.teacher, broadcast))

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        averaged, number = average_weights(uploads), broadcast.round
        if not self.every:
            return single(averaged, broadcast, server)
        told: dict[str, Any] = {"round": number}
        last = broadcast.recipe.rounds
        due = self.start_round <= number < last and (number - self.start_round) % self.every == 0
        if number < self.start_round or (number == self.start_round and not due):
            return single(averaged, broadcast, server, told)
        fusions = 1 + (min(number, last - 1) - self.start_round) // self.every  # up to here
        key = self.key(broadcast.recipe, "teacher.batch_size")
        teacher = teacher_of(self.teacher, broadcast, server, fusions, key)
        merger = self._merger(averaged, teacher, broadcast, server)
        if number > self.start_round:
            merger.load(_read_state(self._state(server, number - 1), broadcast))
        seen = merger.learn(averaged, number / last)
        fused = {name: on_cpu(value) for name, value in merger.fuse(averaged, teacher).items()} if due else {}
        seen |= merger.effect()
        told |= {name: value for name, value in seen.items() if math.isfinite(value)}
        sent = averaged
        if due:
            sent = fused if self._accepts(fused, averaged, broadcast, server, told) else averaged
            if (first := broadcast.recipe.fusion[0]) != self:
                told |= {"accepted": False, "reason": f"only scored: {first.label} comes first in fusion and goes out"}
        blob.write_durably(
            self._state(server, number), blob.pack("adapter", merger.state(), {"recipe_digest": broadcast.digest})
        )
        self._state(server, number - 2).unlink(missing_ok=True)
        return single(sent, broadcast, server, told)

    def _state(self, server: Site, number: int) -> Path:
        """Where the adapter is kept at the end of a round; rules with other options have files of their own."""
        return server.kept_for(self) / f"adapter_{number:03d}.safetensors"

    def _merger(
        self, student: Mapping[str, Tensor], teacher: Mapping[str, Tensor], broadcast: Broadcast, server: Site
    ) -> Merger:
        pairs = chosen_pairs(self.pairs, broadcast)
        seed = broadcast.recipe.seeds.initialisation
        return Merger(pairs, self.adapter, student, teacher, seed, server.device)

    def _accepts(
        self,
        fused: dict[str, Tensor],
        averaged: dict[str, Tensor],
        broadcast: Broadcast,
        server: Site,
        told: dict[str, Any],
    ) -> bool:
        """Whether the fused network is sent; why, in `told` and in the log."""
        finite = all(bool(torch.isfinite(value).all()) for value in fused.values() if value.is_floating_point())
        told["accepted"] = finite
        if not finite:
            told["reason"] = f"not finite; is adapter.learning_rate = {self.adapter.learning_rate:g} too large?"
        elif server.validation is not None and len(server.validation):
            ours, theirs = (
                accuracy(single(weights, broadcast, server), server.validation, broadcast.recipe, server.device)
                for weights in (fused, averaged)
            )
            told |= {"fused_validation": ours, "average_validation": theirs}
            if self.accept_if is not None and ours < theirs - self.accept_if:
                told |= {"accepted": False, "reason": f"{ours:.4f} on validation images, the average {theirs:.4f}"}
        elif self.accept_if is not None:
            raise RunError(
                f"fusion.mergenet.accept_if = {self.accept_if:g}: the server holds no validation images; set validation, for example 0.1"
            )
        if not told["accepted"]:
            log.warning("round %d: the fused network is not sent, the average is: %s", told["round"], told["reason"])
        return bool(told["accepted"])


@torch.inference_mode()
def accuracy(model: Inference, images: Images, recipe: Federated, device: torch.device) -> float:
    """Share of right answers."""
    answers = model.answers(images, device, *preprocessing(recipe)).argmax(1)
    return float((answers.cpu() == images.labels.cpu()).double().mean())


def _read_state(path: Path, broadcast: Broadcast) -> dict[str, Tensor]:
    """The adapter as it was; another one in its place would give other weights, so without it the rounds begin again."""
    try:
        manifest, tensors = blob.read(path, "adapter")
    except ProtocolError as error:
        raise RunError(
            f"{error}; it cannot be made again: remove broadcast.safetensors beside server/ and resume, then all rounds are trained again"
        ) from None
    if manifest.get("recipe_digest") != broadcast.digest:
        raise RunError(f"{path}: the adapter of another recipe; begin anew with another --out")
    return tensors
