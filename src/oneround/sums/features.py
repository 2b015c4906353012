"""The fixed features of a recipe, the same at every site: built from the seed, or sent in the broadcast."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from oneround.config.recipe import Federated
from oneround.data.images import Shape
from oneround.errors import ProtocolError
from oneround.models.dead_leaves import dead_leaves
from oneround.models.features import (
    EXPERT,
    Constants,
    ExpertFeatures,
    Features,
    FeaturesPart,
    Symmetric,
    checksum,
    features,
)
from oneround.sums.moments import Moments

CHECK = "features.check"
EXPONENT = "sums.exponent"
PROCEDURAL = 32  # images that the size of features is measured on


def feature_extras(part: FeaturesPart, constants: Constants) -> dict[str, Tensor]:
    """The broadcast's extras for features: their constants, or a checksum of constants that every site makes itself."""
    if part.from_seed:
        return {CHECK: _checksum(constants)}
    return {f"features.{name}": value for name, value in constants.items()}


def size_of(recipe: Federated, shape: Shape, experts: int) -> int:
    """Number of the recipe's features, with so many experts where it stacks them."""
    part = features.of(recipe.summed.features)
    if isinstance(part, ExpertFeatures):
        return part.size_with(shape, recipe.encoder, experts)
    return part.size_for(shape)


def stacked_extras(experts: Sequence[Mapping[str, Tensor]], beside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The second broadcast's extras: experts' encoders, by number, and the extras of the features beside them."""
    named = {
        f"features.{EXPERT}{number:04d}.{name}": value
        for number, encoder in enumerate(experts)
        for name, value in encoder.items()
    }
    return named | dict(beside)


def constants_of(recipe: Federated, shape: Shape, extras: Mapping[str, Tensor]) -> Constants:
    """The features' constants, at a site that received these extras."""
    return _constants_of(features.of(recipe.summed.features), recipe, shape, extras)


def _constants_of(part: FeaturesPart, recipe: Federated, shape: Shape, extras: Mapping[str, Tensor]) -> Constants:
    if isinstance(part, ExpertFeatures) and part.beside is not None:
        experts = {name: value for name, value in extras.items() if name.startswith(f"features.{EXPERT}")}
        others = {name: value for name, value in extras.items() if name not in experts}
        sent = {name.removeprefix("features."): value for name, value in experts.items()}
        return sent | _constants_of(features.of(part.beside), recipe, shape, others)
    if not part.from_seed:
        return {name.removeprefix("features."): value for name, value in extras.items() if name.startswith("features.")}
    made = constants_from_seed(part, shape, recipe.seeds.initialisation)
    if CHECK in extras and not torch.equal(_checksum(made), extras[CHECK]):
        raise ProtocolError(
            f"sums.features = {part.kind}: seed {recipe.seeds.initialisation} gives other features here than at the server; "
            "use the same versions of oneround, numpy and torch"
        )
    return made


def features_of(recipe: Federated, shape: Shape, constants: Constants) -> Features:
    """The features' module, averaged over mirror images where the recipe says so."""
    part = features.of(recipe.summed.features)
    if isinstance(part, ExpertFeatures):
        built: Features = part.build_with(shape, recipe.encoder, constants)
    else:
        built = part.build(shape, constants)
    built = built.eval().requires_grad_(False)
    return Symmetric(built) if recipe.summed.mirror == "features" else built


@torch.inference_mode()
def exponent_of(recipe: Federated, shape: Shape, constants: Constants, mean: float, std: float) -> Tensor:
    """The approximate size of the features as a power of two, measured on procedural images, so it discloses no data."""
    channels, height, width = shape
    images = dead_leaves(PROCEDURAL, channels, max(height, width), recipe.seeds.initialisation)[:, :, :height, :width]
    outputs = features_of(recipe, shape, constants)((torch.from_numpy(images).float() - mean) / std)
    size = float(outputs.double().square().mean().sqrt())
    return torch.tensor(round(math.log2(size)) if 0 < size < math.inf else 0)


def rescale(moments: Moments, extras: Mapping[str, Tensor], *, back: bool = False) -> Moments:
    """Sums of features rescaled to a size of about 1 by the broadcast's exponent; `back` undoes it."""
    exponent = int(extras.get(EXPONENT, 0))
    return moments.scaled(exponent if back else -exponent)


@lru_cache(maxsize=4)
def constants_from_seed(part: FeaturesPart, shape: Shape, seed: int) -> Constants:
    """The constants, made once per process."""
    with torch.inference_mode(False):
        return part.make(shape, seed, None)


def _checksum(constants: Constants) -> Tensor:
    """SHA-256 as 32 bytes."""
    return torch.frombuffer(bytearray(checksum(constants)), dtype=torch.uint8)
