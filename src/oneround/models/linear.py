"""A linear classifier of fixed features: what a ridge solution is as a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from oneround.models.features import Constants, Features, Shape
from oneround.models.inference import Inference
from oneround.models.prototype import on_cpu


class Linear(Inference):
    """φ(x)·W + b, scaled so that its softmax are class probabilities; `mirrored`: averaged with the mirror image's."""

    weights: Tensor
    bias: Tensor

    def __init__(
        self, features: Features, constants: Constants, shape: Shape, weights: Tensor, bias: Tensor, mirrored: bool
    ) -> None:
        super().__init__()
        self.features, self.constants, self.shape, self.mirrored = features, constants, shape, mirrored
        self.register_buffer("weights", weights)
        self.register_buffer("bias", bias)

    @property
    def at_once(self) -> int:
        return self.features.at_once

    def forward(self, images: Tensor) -> Tensor:
        seen: Tensor = self.features(images)
        if self.mirrored:
            seen = (seen + self.features(images.flip(3))) / 2
        return seen @ self.weights + self.bias

    def shards(self) -> Iterator[dict[str, Tensor]]:
        yield {
            "weights": on_cpu(self.weights),
            "bias": on_cpu(self.bias),
            "shape": torch.tensor(self.shape),
            **{f"features.{name}": value for name, value in self.constants.items()},
        }
