"""Fixed features: what every site computes alike from an image without having learned anything from data.

A features part makes its *constants* (a dictionary of patches, a frozen network) and builds the module that uses them.
Constants that follow from a seed are made at every site; others travel in the Broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from oneround.errors import RecipeError
from oneround.models.encoders import encoders
from oneround.parts import In, Part, Slot

Shape = tuple[int, int, int]
Constants = dict[str, Tensor]


class Features(nn.Module):
    """Normalised images (n, channels, height, width) → (n, size); nothing in it is trained."""

    size: int

    @property
    def at_once(self) -> int:
        """How many images to give it at a time where it is, so that what lies between stays small."""
        return 100


def in_parts(see: Callable[[Tensor], Tensor], images: Tensor, at_once: int, width: int) -> Tensor:
    """see(images) (n, width), a few images at a time, each result copied at once into its place.

    Results that lived on between large temporaries would split the memory those leave, and the process would grow and grow.
    """
    seen = images.new_empty(len(images), width)
    for start in range(0, len(images), at_once):
        seen[start : start + at_once] = see(images[start : start + at_once])
    return seen


class FeaturesPart(Part):
    """A kind of fixed features."""

    @property
    def needs_public(self) -> bool:
        """Whether the server must hold public images."""
        return False

    @property
    def from_seed(self) -> bool:
        """Whether every site can make the constants itself."""
        return True

    def settled(self, shape: Shape) -> FeaturesPart:
        """With the options that depend on the images' shape filled in; what cannot serve that shape is refused."""
        return self

    def size_for(self, shape: Shape) -> int:
        """How many features an image of that shape has."""
        raise NotImplementedError

    def bytes_down(self, shape: Shape) -> int:
        """Bytes of the constants a broadcast carries."""
        return 0

    def make(self, shape: Shape, seed: int, public: Tensor | None) -> Constants:
        """The constants; `public` are normalised images of the server's, for parts that look at some."""
        raise NotImplementedError

    def build(self, shape: Shape, constants: Constants) -> Features:
        """The module, on the CPU."""
        raise NotImplementedError


features: Slot[FeaturesPart] = Slot("features", FeaturesPart, default="patches")


class Symmetric(Features):
    """The mean of an image's features and those of its mirror image: the same for both."""

    def __init__(self, inner: Features) -> None:
        super().__init__()
        self.inner, self.size = inner, inner.size

    @property
    def at_once(self) -> int:
        return self.inner.at_once

    def forward(self, images: Tensor) -> Tensor:
        both: Tensor = self.inner(images) + self.inner(images.flip(3))
        return both / 2


class FrozenFeatures(Features):
    """What leaves an encoder in evaluation mode."""

    def __init__(self, encoder: nn.Module, size: int) -> None:
        super().__init__()
        self.encoder, self.size = encoder, size

    def forward(self, images: Tensor) -> Tensor:
        seen: Tensor = self.encoder(images)
        return seen


@features.register("encoder")
class FrozenEncoder(FeaturesPart):
    """A given encoder, frozen: the server reads it from `local.frozen_encoder` and sends it with the broadcast."""

    encoder: Annotated[Part, In("encoder")] = Field(default="resnet18", validate_default=True)
    """Its architecture."""

    @property
    def from_seed(self) -> bool:
        return False

    def size_for(self, shape: Shape) -> int:
        with torch.device("meta"):
            return encoders.of(self.encoder).build(shape[0]).features

    def bytes_down(self, shape: Shape) -> int:
        with torch.device("meta"):
            held = encoders.of(self.encoder).build(shape[0]).state_dict().values()
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def make(self, shape: Shape, seed: int, public: Tensor | None) -> Constants:
        raise RecipeError(
            "sums.features = encoder: there is no encoder to freeze; name its file, for example --set local.frozen_encoder=encoder.safetensors"
        )

    def build(self, shape: Shape, constants: Constants) -> Features:
        with torch.device("meta"):
            encoder = encoders.of(self.encoder).build(shape[0])
        encoder.load_state_dict(constants, assign=True)
        return FrozenFeatures(encoder.eval().requires_grad_(False), encoder.features)
