"""Taught: the average learns a large network's answers on the server's public images before it goes out again.

The yardstick for MergeNet: the same teacher, the same images, but its knowledge comes as answers and not as parameters (server-side
distillation as in FedDF, Lin et al., 2020, with one teacher).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from oneround.errors import RecipeError
from oneround.fusion.average import Average, average_weights, single
from oneround.fusion.rule import rules
from oneround.learning.distillation import distil
from oneround.mergenet import Teacher, teacher_of
from oneround.models import Inference
from oneround.models.inference import placed
from oneround.models.prototype import filled
from oneround.protocol import Broadcast, Upload
from oneround.recipe import Local
from oneround.sections import Count, Positive
from oneround.site import Site


@rules.register("taught")
class Taught(Average):
    """The average, taught a large network's answers."""

    between_rounds: ClassVar[bool] = True

    teacher: Teacher = Teacher()
    epochs: Count = 1
    """On the public images, after every round."""
    batch_size: Count = 128
    learning_rate: Positive = 0.01
    temperature: Positive = 1.0

    @property
    def needs_public(self) -> bool:
        return True

    def check(self, broadcast: Broadcast, local: Local) -> None:
        self.teacher.check(broadcast, local)

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        averaged = average_weights(uploads)
        if server.data is None or len(server.data) == 0:
            raise RecipeError("fusion.taught: the server has no public images; set public, for example 0.1")
        encoder = broadcast.recipe.model.encoder
        assert encoder is not None
        key = self.key(broadcast.recipe, "teacher.batch_size")
        weights = teacher_of(self.teacher, broadcast, server, broadcast.round, key)
        teacher = filled(self.teacher.encoder, broadcast.shape[0], broadcast.classes, weights)
        training = {
            "epochs": self.epochs, "batch_size": self.batch_size, "learning_rate": self.learning_rate, "schedule": "constant",
        }  # fmt: skip
        net = distil(
            placed(teacher, server.device), broadcast, server.data, server,
            student=encoder, training=training, temperature=self.temperature, batch_key=self.key(broadcast.recipe, "batch_size"),
            start=averaged, name=f"student/{broadcast.round}",
        )  # fmt: skip
        return single(net.weights(), broadcast, server, {"round": broadcast.round})
