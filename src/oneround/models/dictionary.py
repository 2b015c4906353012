"""A dictionary of patches: windows cut from images, contrast-normalised, whitened; some of them are its entries.

Everything is done in float64 by one thread and rounded at the end, so that the same images give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CONTRAST = 6e-4  # added to a window's variance (images in −1…1), so that flat windows stay flat
GRID = 2.0**-16  # constants are rounded to multiples of this, which hides the last bits in which machines differ
FLAT = 0.2  # share of windows, the flattest, that show nothing and are no entries


def dictionary(
    images: NDArray[np.float64],
    entries: int,
    patch: int,
    whitening: float,
    windows: int,
    random: np.random.RandomState,
) -> dict[str, Tensor]:
    """`filters` (entries, channels·patch²) that do whitening and dictionary in one product, `offsets` to subtract afterwards.

    The whitening is measured on so many `windows` of the images (n, channels, height, width).
    """
    raw = torch.from_numpy(_cut(images, patch, max(windows, entries), random))
    raw = raw - raw.mean(1, keepdim=True)
    seen = raw / (raw.square().mean(1, keepdim=True) + CONTRAST).sqrt()
    mean = seen.mean(0)
    centred = seen - mean
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    whiten = directions / (variances + whitening * variances.mean()).sqrt() @ directions.T
    white = centred @ whiten
    lengths = white.norm(dim=1)
    telling = torch.nonzero(lengths > lengths.quantile(FLAT))[:, 0]
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
