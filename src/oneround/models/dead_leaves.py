"""Dead leaves: procedural images with the edges and occlusions of natural ones, without real data.

Opaque discs and bars of all sizes (radius density ∝ r⁻³, Lee, Mumford and Huang, 2001) fall on top of each other; each has a
colour that is mostly a shade of grey. Only additions, products, divisions and square roots are used, which every machine
rounds equally, so a seed gives the same pixels everywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SMALLEST, LARGEST = 5.0, 64.0  # radius in pixels before halving
LEAVES = 300  # per image; enough to cover it
CHROMA = 0.35  # how far colours lie from grey, against brightness


def dead_leaves(images: int, channels: int, size: int, seed: int) -> NDArray[np.float64]:
    """(images, channels, size, size) in 0…1"""
    random = np.random.RandomState(seed)
    pixels = np.empty((images, channels, size, size))
    for image in pixels:
        big = _draw(random, channels, 2 * size)
        image[:] = (big[:, ::2, ::2] + big[:, 1::2, ::2] + big[:, ::2, 1::2] + big[:, 1::2, 1::2]) / 4
    return pixels


def _draw(random: np.random.RandomState, channels: int, size: int) -> NDArray[np.float64]:
    """One image at twice the resolution; halving it smooths the edges."""
    canvas = np.zeros((channels, size, size))
    at = np.arange(size) + 0.5
    uniform = random.random_sample((LEAVES, 8 + channels))
    for draw in uniform:
        span = 1 / SMALLEST**2 - 1 / LARGEST**2
        radius = 1 / np.sqrt(1 / LARGEST**2 + draw[0] * span)
        reach = 1.5 * radius
        rows, columns = (draw[1:3] * (size + 2 * reach) - reach).tolist()
        top, bottom = (int(min(max(edge, 0), size)) for edge in (rows - reach, rows + reach + 1))
        left, right = (int(min(max(edge, 0), size)) for edge in (columns - reach, columns + reach + 1))
        y, x = at[top:bottom, None] - rows, at[None, left:right] - columns
        colour = draw[3] + CHROMA * (draw[8:] - 0.5)
        covered = _shape(x, y, radius, draw[4:8])
        canvas[:, top:bottom, left:right] = np.where(covered, colour[:, None, None], canvas[:, top:bottom, left:right])
    return np.clip(canvas, 0, 1)


def _shape(
    x: NDArray[np.float64], y: NDArray[np.float64], radius: float, draw: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """A disc, or a bar of random direction."""
    if draw[0] < 0.5:
        return np.asarray(x * x + y * y <= radius * radius)
    along = 2 * draw[1:3] - 1
    u, v = along / max(np.sqrt(along[0] * along[0] + along[1] * along[1]), 1e-9)
    thin = radius * (0.1 + 0.9 * draw[3])
    return np.asarray((abs(u * x + v * y) <= radius) & (abs(u * y - v * x) <= thin))
