"""A linear classifier of fixed features: what a ridge solution is as a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from oneround.models.features import Constants, Features, Shape, in_parts
from oneround.models.inference import Inference
from oneround.models.prototype import on_cpu

SOLVED = ("centre", "weights", "bias")


class Linear(Inference):
    """(φ(x) − centre)·W + b, scaled so that its softmax are class probabilities; `mirrored`: averaged with the mirror image's."""

    centre: Tensor
    weights: Tensor
    bias: Tensor

    def __init__(
        self, features: Features, constants: Constants, shape: Shape, solved: dict[str, Tensor], mirrored: bool
    ) -> None:
        """`solved`: centre (D,), weights (D, classes) and bias (classes,); `constants`: what the features were built from."""
        super().__init__()
        self.features, self.constants, self.shape, self.mirrored = features, constants, shape, mirrored
        for name in SOLVED:
            self.register_buffer(name, solved[name])

    def forward(self, images: Tensor) -> Tensor:
        """A few images at a time, so that what lies between stays small; an exported model takes what it is given."""
        if torch.compiler.is_compiling():
            return self._scores(images)
        return in_parts(self._scores, images, self.features.at_once, len(self.bias))

    def _scores(self, images: Tensor) -> Tensor:
        seen: Tensor = self.features(images)
        if self.mirrored:
            seen = (seen + self.features(images.flip(3))) / 2
        return (seen - self.centre) @ self.weights + self.bias

    def shards(self) -> Iterator[dict[str, Tensor]]:
        yield {
            **{name: on_cpu(getattr(self, name)) for name in SOLVED},
            "shape": torch.tensor(self.shape),
            **{f"features.{name}": value for name, value in self.constants.items()},
        }
