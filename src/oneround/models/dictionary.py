"""A dictionary of patches: contrast-normalised and whitened windows of images, a random subset of which are its entries.

Everything is computed in float64 by one thread and rounded at the end, so that the same images give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

CONTRAST = 6e-4  # added to a window's variance (images in −1…1), so that flat windows stay flat
GRID = 2.0**-16  # constants are rounded to multiples of this, which hides the last bits in which machines differ
FLAT = 0.2  # share of windows, the flattest, that are not used as entries


def dictionary(
    images: NDArray[np.float64],
    entries: int,
    patch: int,
    whitening: float,
    windows: int,
    random: np.random.RandomState,
) -> dict[str, Tensor]:
    """`filters` (entries, channels·patch²) that combine whitening and dictionary, `offsets` to subtract from the product.

    The whitening is measured on this number of `windows` of the images (n, channels, height, width).
    """
    raw = torch.from_numpy(_cut(images, patch, max(windows, entries), random))
    raw = raw - raw.mean(1, keepdim=True)
    normalised = raw / (raw.square().mean(1, keepdim=True) + CONTRAST).sqrt()
    mean = normalised.mean(0)
    centred = normalised - mean
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    whiten = directions / (variances + whitening * variances.mean()).sqrt() @ directions.T
    white = centred @ whiten
    lengths = white.norm(dim=1)
    informative = torch.nonzero(lengths > lengths.quantile(FLAT))[:, 0]
    chosen = informative[
        torch.from_numpy(random.permutation(len(informative)))[torch.arange(entries) % len(informative)]
    ]
    filters = white[chosen] / lengths[chosen, None] @ whiten
    offsets = filters @ mean
    filters = filters - filters.mean(1, keepdim=True)  # a window's own mean is subtracted here
    return {"filters": _rounded(filters), "offsets": _rounded(offsets)}


def _cut(images: NDArray[np.float64], patch: int, number: int, random: np.random.RandomState) -> NDArray[np.float64]:
    """(number, channels·patch²): windows at random positions, in the layout of `unfold`."""
    windows = sliding_window_view(images, (patch, patch), axis=(2, 3))
    count, _, rows, columns = windows.shape[:4]
    which, top, left = (random.randint(0, end, number) for end in (count, rows, columns))
    return windows[which, :, top, left].reshape(number, -1)


def _rounded(values: Tensor) -> Tensor:
    """Rounded to the grid, in float32."""
    return ((values / GRID).round() * GRID).float().contiguous()


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums have a fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
