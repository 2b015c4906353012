"""Responses to a dictionary of whitened patches, pooled over a grid (Coates and Ng, 2011), from a seed and no real data.

Patches are cut from dead leaves (or from public images). Every patch-sized window of an image is normalised and whitened like
them. A response r of a window to a dictionary entry gives max(0, r − threshold) and max(0, −r − threshold),
averaged over the cells of a grid; then the square root. With two layers, half of the features come from a second dictionary on
maps of some of these responses at half the resolution.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from oneround.config.parts import Needs
from oneround.config.sections import NotNegative, Positive
from oneround.data.images import Shape
from oneround.errors import RecipeError
from oneround.models.dead_leaves import dead_leaves
from oneround.models.dictionary import CONTRAST, dictionary, one_thread
from oneround.models.features import Constants, Features, FeaturesPart, features
from oneround.seeds import derive

WINDOWS, DEEP_WINDOWS = 50_000, 15_000  # to measure the whitening on
LEAVES, LEAF_SIZE = 100, 64  # procedural images and their side
DEEP_PATCH = 3  # side of a patch of the second layer
DEEP_WEIGHT = 0.25  # of its features; with more, the ridge prefers them where the first layer is better


@features.register("patches")
class Patches(FeaturesPart):
    """Pooled responses to a fixed dictionary of patches."""

    size: Annotated[int, Field(ge=2)] | None = None
    """D, how many features, a multiple of 2·grid²; the upload grows as D²/2. Left out: 6400, or 800 for images of up to 16 pixels."""
    patch: Annotated[int, Field(ge=2, le=16)] | None = None
    """Side of a patch in pixels; default: 6, or 4 for images of up to 16 pixels."""
    grid: Annotated[int, Field(ge=1, le=8)] = 2
    """The image is pooled over grid × grid cells."""
    threshold: NotNegative = 0.25
    """Responses below this are 0."""
    whitening: Positive = 0.3
    """Regularisation: added to the variance of every direction, as a share of the mean variance."""
    layers: Literal[1, 2] = 1
    maps: Annotated[int, Field(ge=2, le=512)] = 32
    """Number of dictionary entries whose responses the second layer uses."""
    source: Literal["leaves", "public"] = "leaves"
    """What the patches are cut from: procedural images, or the server's public ones (then they travel in the broadcast)."""

    @property
    def from_seed(self) -> bool:
        return self.source == "leaves"

    @property
    def needs(self) -> Needs:
        return Needs(public=self.source == "public")

    def _size_and_patch(self, shape: Shape) -> tuple[int, int]:
        """D and the side of a patch for images of that shape; options that do not fit it are refused."""
        small, cells = max(shape[1:]) <= 16, 2 * self.grid**2
        size, patch = self.size or (800 if small else 6400) // cells * cells, self.patch or (4 if small else 6)
        if size % cells or size // cells < self.layers:
            near = max(cells * self.layers, size // cells * cells)
            raise RecipeError(
                f"sums.features.size = {size}: must be a multiple of 2·grid² = {cells}, at least one for each layer; {near} would do"
            )
        short = min(shape[1:]) - patch + 1
        if short < self.grid:
            raise RecipeError(
                f"sums.features.patch = {patch}: leaves {max(short, 0)} windows across an image of {shape[1]}×{shape[2]}, "
                f"fewer than grid = {self.grid}; take {max(2, min(shape[1:]) + 1 - self.grid)} or less"
            )
        deep = short // 2 - DEEP_PATCH + 1
        if self.layers == 2 and deep < self.grid:
            raise RecipeError(
                f"sums.features.layers = 2: leaves {max(deep, 0)} windows across the map of an image of {shape[1]}×{shape[2]}, "
                f"fewer than grid = {self.grid}; take smaller patches or one layer"
            )
        return size, patch

    def resolve(self, shape: Shape) -> Patches:
        size, patch = self._size_and_patch(shape)
        return self.model_copy(update={"size": size, "patch": patch})

    def size_for(self, shape: Shape) -> int:
        return self._size_and_patch(shape)[0]

    def _plan(self, shape: Shape) -> tuple[int, int, int]:
        """Side of a patch, entries of the first layer's dictionary and of the second's."""
        size, patch = self._size_and_patch(shape)
        entries = size // (2 * self.grid**2)
        deep = entries // 2 * (self.layers - 1)
        return patch, entries - deep, deep

    def bytes_down(self, shape: Shape) -> int:
        patch, entries, deep = self._plan(shape)
        numbers = (entries + (self.maps if deep else 0)) * (shape[0] * patch**2 + 1)
        return 0 if self.from_seed else 4 * (numbers + deep * (2 * self.maps * DEEP_PATCH**2 + 1))

    def make(self, shape: Shape, seed: int, public: Tensor | None) -> Constants:
        patch, entries, deep = self._plan(shape)
        random = np.random.RandomState(derive(seed, "patches") % 2**32)
        if self.source == "leaves":
            images = (dead_leaves(LEAVES, shape[0], LEAF_SIZE, derive(seed, "leaves") % 2**32) - 0.5) / 0.5
        else:
            assert public is not None, "the server holds public images"
            images = public.double().numpy()
        with one_thread():
            made = dictionary(images, entries, patch, self.whitening, WINDOWS, random)
            if not deep:
                return made
            first = dictionary(images, self.maps, patch, self.whitening, WINDOWS, random)
            few = torch.from_numpy(images[:: max(1, len(images) // LEAVES)])
            size = (shape[0], *images.shape[2:])
            maps = PatchFeatures(first["filters"], first["offsets"], patch, 1, self.threshold, size).double().maps(few)
            second = dictionary(maps.numpy(), deep, DEEP_PATCH, self.whitening, DEEP_WINDOWS, random)
        named = {f"maps.{name}": value for name, value in first.items()}
        return made | named | {f"deep.{name}": value for name, value in second.items()}

    def build(self, shape: Shape, constants: Constants) -> Features:
        patch, _, deep = self._plan(shape)

        def layer(prefix: str, patch: int, shape: Shape) -> PatchFeatures:
            filters, offsets = constants[f"{prefix}filters"], constants[f"{prefix}offsets"]
            return PatchFeatures(filters, offsets, patch, self.grid, self.threshold, shape)

        first = layer("", patch, shape)
        if not deep:
            return first
        maps = layer("maps.", patch, shape)
        rows, columns = ((side - patch + 1) // 2 for side in shape[1:])
        return TwoLayers(first, maps, layer("deep.", DEEP_PATCH, (2 * self.maps, rows, columns)))


class PatchFeatures(Features):
    """(n, channels, height, width) → (n, 2·entries·grid²)"""

    filters: Tensor
    offsets: Tensor
    cells: Tensor

    def __init__(self, filters: Tensor, offsets: Tensor, patch: int, grid: int, threshold: float, shape: Shape) -> None:
        super().__init__()
        self.patch, self.threshold = patch, threshold
        self.size = 2 * len(filters) * grid**2
        self.windows = [side - patch + 1 for side in shape[1:]]
        rows, columns = (_cells(windows, grid) for windows in self.windows)
        self.register_buffer("filters", filters)
        self.register_buffer("offsets", offsets)
        self.register_buffer("cells", torch.einsum("ia,jb->ijab", rows, columns).reshape(-1, grid**2))

    @property
    def batch_size(self) -> int:
        cores = torch.get_num_threads() * 2**20  # responses that fit into each core's cache
        room = cores if self.filters.device.type == "cpu" else 2**27
        return max(1, room // (len(self.filters) * len(self.cells)))

    def responses(self, images: Tensor) -> Tensor:
        """(n, entries, windows): responses of either sign, soft-thresholded."""
        windows = F.unfold(images, self.patch)
        contrast = (windows.var(1, keepdim=True, correction=0) + CONTRAST).sqrt()
        return F.softshrink(self.filters @ (windows / contrast) - self.offsets[:, None], self.threshold)

    def forward(self, images: Tensor) -> Tensor:
        responses = self.responses(images)
        above = responses.relu() @ self.cells
        below = (above - responses @ self.cells).clamp(min=0)
        return torch.cat([above, below], 1).flatten(1).sqrt()

    def maps(self, images: Tensor) -> Tensor:
        """(n, 2·entries, height/2, width/2): maps of the responses, the input of a second layer."""
        responses = self.responses(images).unflatten(2, self.windows)
        return F.avg_pool2d(torch.cat([responses.relu(), (-responses).relu()], 1), 2).sqrt()


class TwoLayers(Features):
    """One layer's features, and those of a second layer on maps of the first's responses."""

    def __init__(self, first: PatchFeatures, maps: PatchFeatures, second: PatchFeatures) -> None:
        super().__init__()
        self.first, self.maps, self.second = first, maps, second
        self.size = first.size + second.size

    @property
    def batch_size(self) -> int:
        return self.first.batch_size

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.first(images), DEEP_WEIGHT * self.second(self.maps.maps(images))], 1)


def _cells(windows: int, grid: int) -> Tensor:
    """(windows, grid): averages over equal ranges, which share the window on a border."""
    weights = torch.zeros(windows, grid)
    for cell in range(grid):
        low, high = cell * windows // grid, math.ceil((cell + 1) * windows / grid)
        weights[low:high, cell] = 1 / (high - low)
    return weights
