"""Taught: the average is distilled from a large network on the server's public images before the next round.

The baseline for MergeNet: the same teacher and the same images, but knowledge is transferred by outputs and not by parameters
(server-side distillation as in FedDF, Lin et al., 2020, with one teacher).
"""

from __future__ import annotations

from collections.abc import Sequence

from oneround.config.parts import Needs
from oneround.config.recipe import Local
from oneround.config.sections import Count, Positive
from oneround.fusion.average import Average, average_weights, single
from oneround.fusion.base import rules
from oneround.mergenet import Teacher, teacher_of
from oneround.models.inference import Inference, to_inference
from oneround.models.prototype import network_from
from oneround.protocol import Broadcast, Upload
from oneround.site import Site
from oneround.training.distillation import distil
from oneround.training.server_side import public_images


@rules.register("taught")
class Taught(Average):
    """The average, distilled from a large network."""

    teacher: Teacher = Teacher()
    epochs: Count = 1
    """On the public images, after every round."""
    batch_size: Count = 128
    learning_rate: Positive = 0.01
    temperature: Positive = 1.0

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(public=True, state=True)

    def check(self, broadcast: Broadcast, local: Local) -> None:
        self.teacher.check(broadcast, local)

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        averaged = average_weights(uploads)
        images = public_images(server, "fusion.taught")
        key = self.key(broadcast.recipe, "teacher.batch_size")
        weights = teacher_of(self.teacher, broadcast, server, broadcast.round, key)
        teacher = network_from(self.teacher.encoder, broadcast.shape[0], broadcast.classes, weights)
        net = distil(
            to_inference(teacher, server.device),
            broadcast,
            images,
            server,
            student=broadcast.recipe.encoder,
            training=self.model_dump(include={"epochs", "batch_size", "learning_rate"}) | {"schedule": "constant"},
            temperature=self.temperature,
            batch_key=self.key(broadcast.recipe, "batch_size"),
            start=averaged,
            name=f"student/{broadcast.round}",
        )
        return single(net.weights(), broadcast, server, {"round": broadcast.round})
