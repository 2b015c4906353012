"""Responses to a dictionary of whitened patches, pooled over a grid (Coates and Ng, 2011), from a seed and no real data.

Patches are cut from dead leaves (or from public images), contrast-normalised and whitened; some of them are the dictionary.
An image is looked at through every patch-sized window, normalised and whitened alike: a response r of a window to a
dictionary entry gives max(0, r − threshold) and max(0, −r − threshold), averaged over the cells of a grid; then the root.
A second layer does the same to the map of the first layer's responses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from oneround.errors import RecipeError
from oneround.models.features import Constants, Features, FeaturesPart, Shape, features
from oneround.models.leaves import dead_leaves
from oneround.recipe import NotNegative, Positive
from oneround.seeds import derive

CONTRAST = 6e-4  # added to a window's variance (images in −1…1), so that flat windows stay flat
SAMPLED = 50_000  # windows that whitening is measured on
LEAVES, LEAF_SIZE = 100, 64  # procedural images and their side
GRID = 2.0**-16  # constants are rounded to multiples of this, which hides the last bits in which machines differ


@features.register("patches")
class Patches(FeaturesPart):
    """Pooled responses to a fixed dictionary of patches."""

    size: Annotated[int, Field(ge=2)] | None = None
    """D, how many features, a multiple of 2·grid²; the upload grows as D²/2. Left out: 4800, or 800 for images of up to 16 pixels."""
    patch: Annotated[int, Field(ge=2, le=16)] | None = None
    """Side of a patch in pixels; left out: 6, or 4 for images of up to 16 pixels."""
    grid: Annotated[int, Field(ge=1, le=8)] = 2
    """The image is pooled over grid × grid cells."""
    threshold: NotNegative = 0.25
    """Responses below this count as none."""
    whitening: Positive = 0.1
    """Added to the variance of every direction before it is divided by, as a share of the mean variance."""
    source: Literal["leaves", "public"] = "leaves"
    """What the patches are cut from: procedural images, or the server's public ones (then they travel in the broadcast)."""

    @property
    def from_seed(self) -> bool:
        return self.source == "leaves"

    @property
    def needs_public(self) -> bool:
        return self.source == "public"

    def settled(self, shape: Shape) -> Patches:
        small, cells = max(shape[1:]) <= 16, 2 * self.grid**2
        size, patch = self.size or (800 if small else 4800) // cells * cells, self.patch or (4 if small else 6)
        if size % cells:
            near = max(cells, size // cells * cells)
            raise RecipeError(f"sums.features.size = {size}: must be a multiple of 2·grid² = {cells}; {near} would do")
        windows = min(shape[1:]) - patch + 1
        if windows < self.grid:
            raise RecipeError(
                f"sums.features.patch = {patch}: leaves {max(windows, 0)} windows across an image of {shape[1]}×{shape[2]}, "
                f"fewer than grid = {self.grid}; take {max(2, min(shape[1:]) + 1 - self.grid)} or less"
            )
        return self.model_copy(update={"size": size, "patch": patch})

    def size_for(self, shape: Shape) -> int:
        size = self.settled(shape).size
        assert size is not None
        return size

    def make(self, shape: Shape, seed: int, public: Tensor | None) -> Constants:
        size, patch = self.size_for(shape), self.settled(shape).patch
        assert patch is not None
        random = np.random.RandomState(derive(seed, "patches") % 2**32)
        if self.source == "leaves":
            images = (dead_leaves(LEAVES, shape[0], LEAF_SIZE, derive(seed, "leaves") % 2**32) - 0.5) / 0.5
        else:
            assert public is not None, "the server holds public images"
            images = public.double().numpy()
        with one_thread():
            return _dictionary(images, size // (2 * self.grid**2), patch, self.whitening, random)

    def build(self, shape: Shape, constants: Constants) -> Features:
        patch = self.settled(shape).patch
        assert patch is not None
        return PatchFeatures(constants["filters"], constants["offsets"], patch, self.grid, self.threshold, shape)


class PatchFeatures(Features):
    """(n, channels, height, width) → (n, 2·entries·grid²)"""

    filters: Tensor
    offsets: Tensor
    cells: Tensor

    def __init__(self, filters: Tensor, offsets: Tensor, patch: int, grid: int, threshold: float, shape: Shape) -> None:
        super().__init__()
        self.patch, self.threshold = patch, threshold
        self.size = 2 * len(filters) * grid**2
        rows, columns = (_cells(side - patch + 1, grid) for side in shape[1:])
        self.register_buffer("filters", filters)
        self.register_buffer("offsets", offsets)
        self.register_buffer("cells", torch.einsum("ia,jb->ijab", rows, columns).reshape(-1, grid**2))

    @property
    def at_once(self) -> int:
        room = (
            2**20 if self.filters.device.type == "cpu" else 2**27
        )  # responses: what a core's cache holds, or a GPU fills
        return max(1, room // (len(self.filters) * len(self.cells)))

    def forward(self, images: Tensor) -> Tensor:
        windows = F.unfold(images, self.patch)
        contrast = (windows.var(1, keepdim=True, correction=0) + CONTRAST).sqrt()
        responses = self.filters @ (windows / contrast) - self.offsets[:, None]
        beyond = F.softshrink(responses, self.threshold)
        above = beyond.relu() @ self.cells
        below = (above - beyond @ self.cells).clamp(min=0)
        return torch.cat([above, below], 1).flatten(1).sqrt()


def _cells(windows: int, grid: int) -> Tensor:
    """(windows, grid): averages over equal stretches, sharing the window on a border."""
    weights = torch.zeros(windows, grid)
    for cell in range(grid):
        low, high = cell * windows // grid, math.ceil((cell + 1) * windows / grid)
        weights[low:high, cell] = 1 / (high - low)
    return weights


def _dictionary(
    images: NDArray[np.float64], entries: int, patch: int, whitening: float, random: np.random.RandomState
) -> Constants:
    """Filters (entries, channels·patch²) that do whitening and dictionary in one product, and what to subtract afterwards."""
    raw = torch.from_numpy(_cut(images, patch, max(SAMPLED, entries), random))
    raw = raw - raw.mean(1, keepdim=True)
    windows = raw / (raw.square().mean(1, keepdim=True) + CONTRAST).sqrt()
    mean = windows.mean(0)
    centred = windows - mean
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    whiten = directions / (variances + whitening * variances.mean()).sqrt() @ directions.T
    white = centred @ whiten
    lengths = white.norm(dim=1)
    telling = torch.nonzero(lengths > lengths.quantile(0.2))[:, 0]  # the flattest windows show nothing
    chosen = telling[torch.from_numpy(random.permutation(len(telling)))[torch.arange(entries) % len(telling)]]
    filters = white[chosen] / lengths[chosen, None] @ whiten
    offsets = filters @ mean
    filters = filters - filters.mean(1, keepdim=True)  # a window's own mean is subtracted here
    return {"filters": _rounded(filters), "offsets": _rounded(offsets)}


def _cut(images: NDArray[np.float64], patch: int, number: int, random: np.random.RandomState) -> NDArray[np.float64]:
    """(number, channels·patch²): windows from random places, laid out as `unfold` does."""
    count, channels, height, width = images.shape
    which = random.randint(0, count, number)
    top, left = random.randint(0, height - patch + 1, number), random.randint(0, width - patch + 1, number)
    side = np.arange(patch)
    cut: NDArray[np.float64] = images[
        which[:, None, None, None],
        np.arange(channels)[None, :, None, None],
        (top[:, None] + side)[:, None, :, None],
        (left[:, None] + side)[:, None, None, :],
    ]
    return cut.reshape(number, -1)


def _rounded(values: Tensor) -> Tensor:
    return ((values / GRID).round() * GRID).float().contiguous()


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order, whatever the number of threads outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
