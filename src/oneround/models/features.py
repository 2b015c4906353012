"""Fixed features: every site computes the same features of an image, without training on its data.

A features part makes its *constants* (a dictionary of patches, a frozen network) and builds the module that uses them.
Constants that follow from a seed are made at every site; others travel in the Broadcast.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from oneround.config.parts import In, Needs, Part, Slot
from oneround.data.images import Shape as Shape
from oneround.errors import RecipeError
from oneround.models.encoders import Encoder, encoders
from oneround.seeds import generator

Constants = dict[str, Tensor]


class Features(nn.Module):
    """Normalised images (n, channels, height, width) → (n, size); nothing in it is trained."""

    size: int

    @property
    def batch_size(self) -> int:
        """Batch size on its device that keeps temporary memory small."""
        return 100


def in_batches(module: Callable[[Tensor], Tensor], images: Tensor, batch_size: int, width: int) -> Tensor:
    """module(images) (n, width) in batches; each result is copied at once into one preallocated tensor.

    Keeping the results between large temporaries would fragment memory, and the process would grow.
    """
    outputs = images.new_empty(len(images), width)
    for start in range(0, len(images), batch_size):
        outputs[start : start + batch_size] = module(images[start : start + batch_size])
    return outputs


class FeaturesPart(Part):
    """A kind of fixed features."""

    @property
    def from_seed(self) -> bool:
        """Whether every site can make the constants itself."""
        return True

    def resolve(self, shape: Shape) -> FeaturesPart:
        """The part with the options that depend on the images' shape filled in; options that do not fit are refused."""
        return self

    def size_for(self, shape: Shape) -> int:
        """Number of features of an image of that shape; without those of experts."""
        raise NotImplementedError

    def bytes_down(self, shape: Shape) -> int:
        """Bytes of the constants a broadcast carries."""
        return 0

    def make(self, shape: Shape, seed: int, public: Tensor | None) -> Constants:
        """The constants; `public`: the server's normalised images, for parts that need them."""
        raise NotImplementedError

    def build(self, shape: Shape, constants: Constants) -> Features:
        """The module, on the CPU."""
        raise NotImplementedError


def checksum(tensors: Mapping[str, Tensor]) -> bytes:
    """SHA-256 of named tensors: names, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.digest()


features: Slot[FeaturesPart] = Slot("features", FeaturesPart, default="patches")


class Symmetric(Features):
    """The mean of an image's features and those of its mirror image: the same for both."""

    def __init__(self, inner: Features) -> None:
        super().__init__()
        self.inner, self.size = inner, inner.size

    @property
    def batch_size(self) -> int:
        return self.inner.batch_size

    def forward(self, images: Tensor) -> Tensor:
        both: Tensor = self.inner(images) + self.inner(images.flip(3))
        return both / 2


class FrozenFeatures(Features):
    """Features of a frozen encoder."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder, self.size = encoder, encoder.features

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.encoder(images)
        return outputs


class StackedFeatures(Features):
    """Unit features of several networks, one after another, and other features after them."""

    def __init__(self, networks: Sequence[Encoder], beside: Features | None) -> None:
        super().__init__()
        self.networks, self.beside = nn.ModuleList(networks), beside
        self.blocks = [*(each.features for each in networks), *([beside.size] if beside else [])]
        """Number of features of each network, and of those beside them."""
        self.size = sum(self.blocks)

    @property
    def batch_size(self) -> int:
        return self.beside.batch_size if self.beside else super().batch_size

    def forward(self, images: Tensor) -> Tensor:
        parts = [F.normalize(network(images), dim=1) for network in self.networks]
        return torch.cat([*parts, self.beside(images)] if self.beside else parts, 1)


EXPERT = "expert."
"""What names of an expert's constants begin with; its number follows."""


@features.register("experts")
class ExpertFeatures(FeaturesPart):
    """Unit features of all clients' networks, which the server sends back to the sites in a second exchange."""

    beside: Annotated[Part, In("features")] | None = Field(default="patches", validate_default=True)
    """Fixed features beside them; null: none."""

    @model_validator(mode="after")
    def _beside_is_fixed(self) -> ExpertFeatures:
        if self.beside is not None and self.beside.needs.experts:
            raise ValueError("beside = experts: are there already; take patches, or null")
        return self

    @property
    def _besides(self) -> list[FeaturesPart]:
        """The features beside the experts', if there are any."""
        return [] if self.beside is None else [features.of(self.beside)]

    @property
    def from_seed(self) -> bool:
        return False

    @property
    def needs(self) -> Needs:
        return Needs(experts=True, public=any(each.needs.public for each in self._besides))

    def resolve(self, shape: Shape) -> ExpertFeatures:
        return self.model_copy(update={"beside": next((each.resolve(shape) for each in self._besides), None)})

    def size_for(self, shape: Shape) -> int:
        return sum(each.size_for(shape) for each in self._besides)

    def size_with(self, shape: Shape, encoder: Part, experts: int) -> int:
        """Number of features with so many experts of this architecture."""
        with torch.device("meta"):
            return experts * encoders.of(encoder).build(shape[0]).features + self.size_for(shape)

    def bytes_down(self, shape: Shape) -> int:
        return sum(each.bytes_down(shape) for each in self._besides)

    def make(self, shape: Shape, seed: int, public: Tensor | None) -> Constants:
        raise RecipeError("sums.features = experts: networks are trained, not made")

    def build_with(self, shape: Shape, encoder: Part, constants: Constants) -> StackedFeatures:
        """As many networks of this architecture as the constants have, and the features beside them."""
        networks = []
        for number in sorted({name.split(".")[1] for name in constants if name.startswith(EXPERT)}):
            with torch.device("meta"):
                network = encoders.of(encoder).build(shape[0])
            start = f"{EXPERT}{number}."
            own = {name.removeprefix(start): value for name, value in constants.items() if name.startswith(start)}
            network.load_state_dict(own, assign=True)
            networks.append(network.eval().requires_grad_(False))
        others = {name: value for name, value in constants.items() if not name.startswith(EXPERT)}
        return StackedFeatures(networks, next((each.build(shape, others) for each in self._besides), None))


class Projection(Features):
    """Other features in a random order and with random signs, added up to fewer."""

    order: Tensor
    signs: Tensor

    def __init__(self, inner: Features, size: int, order: Tensor, signs: Tensor) -> None:
        """`order` and `signs`: (features of `inner`,)"""
        super().__init__()
        self.inner, self.size = inner, size
        self.register_buffer("order", order)
        self.register_buffer("signs", signs)

    @property
    def batch_size(self) -> int:
        return self.inner.batch_size

    def forward(self, images: Tensor) -> Tensor:
        mixed = (self.inner(images) * self.signs)[:, self.order]
        added: Tensor = F.pad(mixed, (0, -len(self.order) % self.size)).unflatten(1, (-1, self.size)).sum(1)
        return added


@features.register("projected")
class ProjectedFeatures(FeaturesPart):
    """More features than sums have room for (a finer grid, more patches), brought to fewer by a random projection from the seed."""

    features: Annotated[Part, In("features")] = Field(
        default={"kind": "patches", "size": 25_600, "grid": 4}, validate_default=True
    )
    """What is projected."""
    size: Annotated[int, Field(ge=2)] = 6400
    """D, to how many."""

    @property
    def _inner(self) -> FeaturesPart:
        return features.of(self.features)

    @property
    def from_seed(self) -> bool:
        return self._inner.from_seed

    @property
    def needs(self) -> Needs:
        return self._inner.needs

    def resolve(self, shape: Shape) -> ProjectedFeatures:
        inner = self._inner.resolve(shape)
        if inner.needs.experts or inner.size_for(shape) <= self.size:
            raise RecipeError(
                f"sums.features.size = {self.size}: the features that are projected must be fixed and more, these are "
                f"{inner.kind} of {inner.size_for(shape)}; take fewer than that, or no projection"
            )
        return self.model_copy(update={"features": inner})

    def size_for(self, shape: Shape) -> int:
        return self.size

    def bytes_down(self, shape: Shape) -> int:
        return self._inner.bytes_down(shape) + (0 if self.from_seed else 12 * self._inner.size_for(shape))

    def make(self, shape: Shape, seed: int, public: Tensor | None) -> Constants:
        count, random = self._inner.size_for(shape), generator(seed, "projection")
        drawn = {
            "projection.order": torch.randperm(count, generator=random),
            "projection.signs": torch.randint(0, 2, (count,), generator=random).float() * 2 - 1,
        }
        return self._inner.make(shape, seed, public) | drawn

    def build(self, shape: Shape, constants: Constants) -> Features:
        drawn = {name: constants[f"projection.{name}"] for name in ("order", "signs")}
        return Projection(self._inner.build(shape, constants), self.size, **drawn)


@features.register("encoder")
class FrozenEncoder(FeaturesPart):
    """A frozen encoder: the server reads it from `local.frozen_encoder` and sends it with the broadcast."""

    encoder: Annotated[Part, In("encoder")] = Field(default="resnet18", validate_default=True)
    """Its architecture."""

    @property
    def from_seed(self) -> bool:
        return False

    def _without_weights(self, shape: Shape) -> Encoder:
        with torch.device("meta"):
            return encoders.of(self.encoder).build(shape[0])

    def size_for(self, shape: Shape) -> int:
        return self._without_weights(shape).features

    def bytes_down(self, shape: Shape) -> int:
        return sum(tensor.nbytes for tensor in self._without_weights(shape).state_dict().values())

    def make(self, shape: Shape, seed: int, public: Tensor | None) -> Constants:
        raise RecipeError(
            "sums.features = encoder: there is no encoder to freeze; name its file, for example --set local.frozen_encoder=encoder.safetensors"
        )

    def build(self, shape: Shape, constants: Constants) -> Features:
        encoder = self._without_weights(shape)
        encoder.load_state_dict(constants, assign=True)
        return FrozenFeatures(encoder.eval().requires_grad_(False))
