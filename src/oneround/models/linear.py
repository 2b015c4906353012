"""A linear classifier of fixed features: what a ridge solution is as a model."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from oneround.data import Images
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

    def answers(self, images: Images, device: torch.device, mean: float, std: float) -> Tensor:
        """Remembered: the sums stay as they are while the networks beside them train on, and several rules ask the same."""
        asked = (self._digest(), _digest({"pixels": images.pixels}), device, mean, std)
        for known, scores in _answered:
            if known == asked:
                return scores
        found = super().answers(images, device, mean, std)
        _answered.append((asked, found))
        return found

    def _digest(self) -> str:
        """SHA-256 of all that its answers depend on."""
        (tensors,) = self.shards()
        return _digest({**tensors, "mirrored": torch.tensor(self.mirrored)})

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


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


_answered: deque[tuple[object, Tensor]] = deque(maxlen=8)
"""Which classifier was asked, about what and how, and its scores."""
