"""A linear classifier of fixed features: the model of a ridge solution."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from oneround.data.images import Images, Shape
from oneround.models.features import Constants, Features, checksum, in_batches
from oneround.models.inference import Inference
from oneround.models.prototype import on_cpu
from oneround.session import ScoringSession

SOLVED = ("centre", "weights", "bias")
CACHED = 8  # sets of images whose scores a session keeps


class Linear(Inference):
    """(φ(x) − centre)·W + b, scaled so that its softmax gives class probabilities; `mirrored`: averaged with the mirror image's."""

    centre: Tensor
    weights: Tensor
    bias: Tensor

    def __init__(
        self,
        features: Features,
        constants: Constants,
        shape: Shape,
        solved: dict[str, Tensor],
        mirrored: bool,
        session: ScoringSession | None = None,
    ) -> None:
        """`solved`: centre (D,), weights (D, classes) and bias (classes,); `constants`: those the features are built from.

        `session`: caches its scores.
        """
        super().__init__()
        self.session = session
        self.features, self.constants, self.shape, self.mirrored = features, constants, shape, mirrored
        for name in SOLVED:
            self.register_buffer(name, solved[name])

    def forward(self, images: Tensor) -> Tensor:
        """In batches, to keep temporary memory small; an exported model takes its input as one batch."""
        if torch.compiler.is_compiling():
            return self._scores(images)
        return in_batches(self._scores, images, self.features.batch_size, len(self.bias))

    def predict(self, images: Images, device: torch.device, mean: float, std: float) -> Tensor:
        """Cached in the session: sums do not change between snapshots, and several rules use the same scores."""
        if self.session is None:
            return super().predict(images, device, mean, std)
        (tensors,) = self.shards()
        key = (checksum(tensors), checksum({"pixels": images.pixels}), self.mirrored, device, mean, std)
        predict = super().predict
        return self.session.once("scores", key, lambda: predict(images, device, mean, std), CACHED)

    def _scores(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.features(images)
        if self.mirrored:
            outputs = (outputs + self.features(images.flip(3))) / 2
        return (outputs - self.centre) @ self.weights + self.bias

    def shards(self) -> Iterator[dict[str, Tensor]]:
        yield {
            **{name: on_cpu(getattr(self, name)) for name in SOLVED},
            "shape": torch.tensor(self.shape),
            **{f"features.{name}": value for name, value in self.constants.items()},
        }
