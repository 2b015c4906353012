"""Distilled: the ensemble of another rule, distilled into one network (FedDF: Lin et al., 2020; calibrated: FEDIC).

The result is one network, of any registered encoder, instead of one per client. The teacher is evaluated on public images of the
server, labelled or not, or on synthetic ones where there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from oneround.config.parts import In, Needs, Part, RulePart
from oneround.config.recipe import Local
from oneround.config.sections import Count, Positive
from oneround.data import Images
from oneround.fusion.base import Rule, SavedModel, rules
from oneround.models import Ensemble, Inference
from oneround.protocol.messages import Broadcast, Shapes, Upload
from oneround.site import Site
from oneround.training.distillation import ScoreFunction, calibrated, distil, inversions, noise_images, with_mixes
from oneround.training.server_side import public_images


@rules.register("distilled")
class Distilled(Rule):
    """One network distilled from the ensemble of another rule."""

    teacher: Annotated[RulePart, In("fusion")] = Field(default="typicality-gated", validate_default=True)
    """The fusion rule whose ensemble is the teacher."""
    student: Annotated[Part, In("encoder")] | None = None
    """Its encoder; default: the clients' own."""
    images: Literal["public", "noise", "inversions"] = "public"
    """Images for distillation: the server's public images (their labels are not used), noise, or inversions of the teacher."""
    calibrate: bool = False
    """Calibrate the teacher's scores on labelled public images, with balanced classes, before distillation."""
    mixes: Annotated[int, Field(ge=0)] = 0
    """Number of mixes of two public images to add."""
    made_up: Count = 2000
    """Number of synthetic images, for noise and inversions."""
    epochs: Count = 50
    batch_size: Count = 128
    learning_rate: Positive = 0.05
    temperature: Positive = 1.0

    @property
    def needs(self) -> Needs:
        return super().needs | self._teacher.needs | Needs(public=self.images == "public" or self.calibrate)

    @property
    def discloses(self) -> str:
        return self._teacher.discloses

    @property
    def _teacher(self) -> Rule:
        return rules.of(self.teacher)

    def statistics(self, classes: int, features: int) -> Shapes:
        return self._teacher.statistics(classes, features)

    def measure(self, unit: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        return self._teacher.measure(unit, labels, classes)

    def judge(self, logits: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        return self._teacher.judge(logits, labels, classes)

    def check_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        self._teacher.check_statistics(statistics)

    def check(self, broadcast: Broadcast, local: Local) -> None:
        self._teacher.check(broadcast, local)

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        fused = self._teacher.fuse(uploads, broadcast, server)
        if isinstance(fused, Ensemble):
            fused = fused.load_experts()
        teacher: ScoreFunction = fused.to(server.device).eval().requires_grad_(False)
        if self.calibrate:
            teacher = calibrated(teacher, _public(server), broadcast.classes, server.device)
        net = distil(
            teacher,
            broadcast,
            self._images(teacher, broadcast, server),
            server,
            student=self.student or broadcast.recipe.encoder,
            training=self.model_dump(include={"epochs", "batch_size", "learning_rate"}) | {"schedule": "cosine"},
            temperature=self.temperature,
            batch_key=self.key(broadcast.recipe, "batch_size"),
        )
        saved = SavedModel([net.weights], broadcast.recipe, broadcast.shape[0], broadcast.classes)
        return self.restore(saved).to(server.device)

    def _images(self, teacher: ScoreFunction, broadcast: Broadcast, server: Site) -> Images:
        seed = broadcast.recipe.seeds.training
        if self.images == "public":
            return with_mixes(_public(server), self.mixes, seed)
        if self.images == "noise":
            return noise_images(broadcast.shape, self.made_up, seed)
        return inversions(teacher, broadcast.shape, broadcast.classes, self.made_up, seed, server.device)

    def restore(self, saved: SavedModel) -> Inference:
        return saved.network(self.student or saved.recipe.encoder)


def _public(server: Site) -> Images:
    return public_images(server, "fusion.distilled", ", or images: inversions and calibrate: false")
