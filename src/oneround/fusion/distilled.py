"""Distilled: the ensemble another rule makes, taught into one network (FedDF: Lin et al., 2020; calibrated: FEDIC).

A site then gets one network, of any registered kind, instead of one per client. The teacher answers on public images of the
server, labelled or not, or on made-up ones where there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from oneround.data import Images
from oneround.errors import RecipeError
from oneround.fusion.rule import Rule, rules
from oneround.learning.distillation import Answers, calibrated, distil, inversions, noise_images, with_mixes
from oneround.models import Ensemble, Inference, Single
from oneround.models.prototype import filled
from oneround.parts import In, Part
from oneround.protocol import Broadcast, Upload
from oneround.protocol.messages import Shapes
from oneround.recipe import Federated
from oneround.sections import Count, Positive
from oneround.site import Site


@rules.register("distilled")
class Distilled(Rule):
    """One network that answers as the ensemble of another rule does."""

    teacher: Annotated[Part, In("fusion")] = Field(default="typicality-gated", validate_default=True)
    """The rule whose ensemble teaches."""
    student: Annotated[Part, In("encoder")] | None = None
    """Its encoder; left out: the clients' own kind."""
    images: Literal["public", "noise", "inversions"] = "public"
    """What the teacher answers on: the server's public images (their labels are not used), noise, or inversions of itself."""
    calibrate: bool = False
    """Put the teacher's answers right on labelled public images, every class alike, before it teaches."""
    mixes: Annotated[int, Field(ge=0)] = 0
    """So many mixes of two public images are shown as well; the teacher answers on them too."""
    made_up: Count = 2000
    """How many images to make up, where none are public."""
    epochs: Count = 50
    batch_size: Count = 128
    learning_rate: Positive = 0.05
    temperature: Positive = 1.0

    @property
    def needs_public(self) -> bool:
        return self.images == "public" or self.calibrate or self._teacher.needs_public

    @property
    def needs_sums(self) -> bool:
        return self._teacher.needs_sums

    @property
    def needs_counts(self) -> bool:
        return self._teacher.needs_counts

    @property
    def reveals(self) -> str:
        return self._teacher.reveals

    @property
    def _teacher(self) -> Rule:
        return rules.of(self.teacher)

    def statistics(self, classes: int, features: int) -> Shapes:
        return self._teacher.statistics(classes, features)

    def measure(self, unit: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        return self._teacher.measure(unit, labels, classes)

    def judge(self, logits: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        return self._teacher.judge(logits, labels, classes)

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        fused = self._teacher.fuse(uploads, broadcast, server)
        if isinstance(fused, Ensemble):
            fused = fused.settle()
        answers: Answers = fused.to(server.device).eval().requires_grad_(False)
        if self.calibrate:
            answers = calibrated(answers, self._public(server), broadcast.classes, server.device)
        encoder = self.student or broadcast.recipe.model.encoder
        assert encoder is not None
        training = {
            "epochs": self.epochs, "batch_size": self.batch_size, "learning_rate": self.learning_rate, "schedule": "cosine",
        }  # fmt: skip
        net = distil(
            answers, broadcast, self._images(answers, broadcast, server), server,
            student=encoder, training=training, temperature=self.temperature, batch_key=self.key(broadcast.recipe, "batch_size"),
        )  # fmt: skip
        return self.restore([net.weights()], broadcast.recipe, broadcast.shape[0], broadcast.classes, False).to(
            server.device
        )

    def _images(self, answers: Answers, broadcast: Broadcast, server: Site) -> Images:
        seed = broadcast.recipe.seeds.training
        if self.images == "public":
            return with_mixes(self._public(server), self.mixes, seed)
        if self.images == "noise":
            return noise_images(broadcast.shape, self.made_up, seed)
        return inversions(answers, broadcast.shape, broadcast.classes, self.made_up, seed, server.device)

    def _public(self, server: Site) -> Images:
        if server.data is None or len(server.data) == 0:
            raise RecipeError(
                "fusion.distilled: the server has no public images; set public (for example 0.1), or images: inversions and calibrate: false"
            )
        return server.data

    def restore(
        self, shards: Sequence[dict[str, Tensor]], recipe: Federated, channels: int, classes: int, streamed: bool
    ) -> Inference:
        encoder = self.student or recipe.model.encoder
        assert encoder is not None
        with torch.no_grad():
            return Single(filled(encoder, channels, classes, shards[0]).eval().requires_grad_(False))
