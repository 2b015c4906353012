"""The fixed features a recipe asks for, the same at every site: built from the seed, or carried in the broadcast."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from oneround.errors import ProtocolError
from oneround.models.features import Constants, Features, FeaturesPart, Shape, Symmetric, features
from oneround.models.leaves import dead_leaves
from oneround.recipe import Federated
from oneround.sums.moments import Moments

CHECK = "features.check"
EXPONENT = "sums.exponent"
PROCEDURAL = 32  # images that features are tried on


def announce(part: FeaturesPart, constants: Constants) -> dict[str, Tensor]:
    """What a broadcast says of the features: the constants, or a checksum of those every site makes itself."""
    if part.from_seed:
        return {CHECK: _checksum(constants)}
    return {f"features.{name}": value for name, value in constants.items()}


def constants_of(recipe: Federated, shape: Shape, extras: Mapping[str, Tensor]) -> Constants:
    """The features' constants at a site that received these extras."""
    assert recipe.sums is not None
    part = features.of(recipe.sums.features)
    if not part.from_seed:
        return {name.removeprefix("features."): value for name, value in extras.items() if name.startswith("features.")}
    made = _made(part, shape, recipe.seeds.initialisation)
    if CHECK in extras and not torch.equal(_checksum(made), extras[CHECK]):
        raise ProtocolError(
            f"sums.features = {part.kind}: seed {recipe.seeds.initialisation} gives other features here than at the server; "
            "use the same versions of oneround, numpy and torch"
        )
    return made


def features_of(recipe: Federated, shape: Shape, constants: Constants) -> Features:
    """The module, mirror images taken into account as the recipe says."""
    assert recipe.sums is not None
    built = features.of(recipe.sums.features).build(shape, constants).eval().requires_grad_(False)
    return Symmetric(built) if recipe.sums.mirror == "features" else built


@torch.inference_mode()
def exponent_of(recipe: Federated, shape: Shape, constants: Constants, mean: float, std: float) -> Tensor:
    """About how large the features are, as a power of two: tried on procedural images, so it tells nothing of data."""
    channels, height, width = shape
    made = dead_leaves(PROCEDURAL, channels, max(height, width), recipe.seeds.initialisation)[:, :, :height, :width]
    seen = features_of(recipe, shape, constants)((torch.from_numpy(made).float() - mean) / std)
    size = float(seen.double().square().mean().sqrt())
    return torch.tensor(round(math.log2(size)) if 0 < size < math.inf else 0)


def evened(moments: Moments, extras: Mapping[str, Tensor], *, back: bool = False) -> Moments:
    """Sums of features brought to a size of about 1, as the broadcast says; or brought back."""
    exponent = int(extras.get(EXPONENT, 0))
    return moments.scaled(exponent if back else -exponent)


@lru_cache(maxsize=4)
def _made(part: FeaturesPart, shape: Shape, seed: int) -> Constants:
    """Once for all clients of a process, whoever asks first."""
    with torch.inference_mode(False):
        return part.make(shape, seed, None)


def _checksum(constants: Constants) -> Tensor:
    """SHA-256 as 32 bytes."""
    digest = hashlib.sha256()
    for name in sorted(constants):
        digest.update(
            f"{name}:{tuple(constants[name].shape)}".encode() + constants[name].contiguous().numpy().tobytes()
        )
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
