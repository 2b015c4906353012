"""Student: one network trained on images that the clients' generators make (as in FedDiff and FederatedFactory, 2024 to 2026).

The clients' images stay where they are; the server trains on as many as it likes that look like them, with all clients' classes in
every batch. The result is one network, however many clients there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from oneround.config.parts import In, Needs, Part
from oneround.config.sections import Augment, Count, Fraction, NotNegative, Positive
from oneround.fusion.base import Rule, SavedModel, rules
from oneround.fusion.generated import Generated, generated_images
from oneround.models import Inference, Single, initialise
from oneround.protocol.messages import Broadcast, Upload
from oneround.site import Site
from oneround.training.server_side import OWN_TRAINING, server_recipe, train_on_server


class StudentViews(Augment):
    """Random views whose defaults are shifts by an eighth and holes (4 and 9 pixels of 32), without other crops and colours."""

    crop_scale: list[Fraction] = Field(default=[1.0, 1.0], min_length=2, max_length=2)
    crop_ratio: list[Positive] = Field(default=[1.0, 1.0], min_length=2, max_length=2)
    jitter: Fraction = 0.0
    greyscale: Fraction = 0.0
    shift: Annotated[float, Field(ge=0, lt=1)] = 0.125
    hole: Fraction = 0.28


class Mirrored(Single):
    """Scores of an image and of its mirror image, averaged."""

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = (self.net(images).log_softmax(1) + self.net(images.flip(3)).log_softmax(1)) / 2
        return scores


@rules.register("student")
class Student(Rule):
    """One network trained on the clients' generated images."""

    generated: Generated = Generated()
    student: Annotated[Part, In("encoder")] | None = None
    """Its encoder; default: the one of `model`."""
    epochs: Count = 40
    """On the generated images."""
    batch_size: Count = 512
    learning_rate: Positive = 0.2
    """Of SGD with Nesterov's momentum; it rises for a fifth of the training and then falls to 0."""
    weight_decay: NotNegative = 5e-4
    smoothing: Fraction = 0.05
    """Of the labels: the share that all classes have together."""
    augment: StudentViews = StudentViews()
    """Random views; mirror images as often as in `training`, unless flip is set."""
    mirrored: bool = True
    """Average the scores of an image and of its mirror image, where training has mirror images too."""

    @property
    def needs(self) -> Needs:
        return Needs(generator=True, class_counts=True)

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        def on_progress(text: str, done: int, total: int) -> None:
            server.emit({"event": "fusing", "rule": self.label, "text": text, "done": done, "of": total})

        def on_training(event: dict[str, Any]) -> None:
            if event["event"] == "epoch":
                on_progress("epochs of the student", event["epoch"], self.epochs)
            elif event["event"] == "trouble":
                server.emit(event)

        images, digest = generated_images(uploads, broadcast, server, self.generated, on_progress)
        encoder, seed = self.student or broadcast.recipe.encoder, broadcast.recipe.seeds.initialisation
        start = initialise(encoder, broadcast.shape[0], broadcast.classes, seed, "linear").weights()
        net = train_on_server(
            broadcast,
            server_recipe(broadcast.recipe, *self._how(broadcast), {"encoder": encoder.dump(), "head": "linear"}),
            start,
            images,
            server,
            "student",
            self.key(broadcast.recipe, "batch_size"),
            folder=server.state_folder(self) / digest[:16] if server.folder else None,
            emit=on_training,
        )
        saved = SavedModel([net.weights], broadcast.recipe, broadcast.shape[0], broadcast.classes)
        return self.restore(saved).to(server.device)

    def _how(self, broadcast: Broadcast) -> tuple[dict[str, Any], dict[str, Any]]:
        """What it minimises, and how."""
        augment = self.augment.model_dump()
        if augment["flip"] is None:
            augment["flip"] = broadcast.recipe.training.augment.flip
        training = {
            **OWN_TRAINING, **self.model_dump(include={"epochs", "batch_size", "learning_rate", "weight_decay"}), "augment": augment,
            "optimizer": "sgd", "momentum": 0.9, "nesterov": True, "schedule": "triangular", "views": 1, "clip_norm": 0.0,
            "last_batch": "wrap",
        }  # fmt: skip
        return {"terms": {"smoothed-cross-entropy": {"smoothing": self.smoothing}}}, training

    def restore(self, saved: SavedModel) -> Inference:
        single = saved.network(self.student or saved.recipe.encoder)
        return Mirrored(single.net) if self.mirrored and saved.recipe.training.augment.flip else single
