"""Statistical tests of masked numbers."""

from __future__ import annotations

import numpy as np


def looks_uniform(numbers: np.ndarray) -> bool:
    """Every byte position of 64-bit numbers is uniform: chi² over 256 values within 6 deviations of its mean."""
    for position in range(8):
        counts = np.bincount(numbers.reshape(-1).view(np.uint8)[position::8], minlength=256)
        expected = counts.sum() / 256
        if abs(((counts - expected) ** 2 / expected).sum() - 255) > 6 * np.sqrt(2 * 255):
            return False
    return True


def ignores(numbers: np.ndarray, plain: np.ndarray) -> bool:
    """Whether 64-bit numbers look like noise and are uncorrelated with the data they mask."""
    share = np.ascontiguousarray(numbers).reshape(-1).view(np.uint64) / 2.0**64
    far = 5 / np.sqrt(plain.size)
    alike = np.ptp(plain) and abs(float(np.corrcoef(share, plain.reshape(-1))[0, 1]))
    return looks_uniform(np.ascontiguousarray(numbers)) and alike <= far
