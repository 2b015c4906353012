"""Procedural images."""

from __future__ import annotations

import numpy as np

from oneround.models.dead_leaves import dead_leaves


def test_leaves_cover_the_image_and_need_no_data() -> None:
    images = dead_leaves(3, 3, 32, 5)
    assert images.shape == (3, 3, 32, 32) and images.min() >= 0 and images.max() <= 1
    assert np.array_equal(images, dead_leaves(3, 3, 32, 5)) and not np.array_equal(images, dead_leaves(3, 3, 32, 6))
    assert 0.1 < images.std() < 0.4 and (images == 0).mean() < 0.2


def test_leaves_are_flat_with_sharp_edges() -> None:
    """Most neighbours are alike, some are far apart: what natural images have and noise has not."""
    (image,) = dead_leaves(1, 1, 64, 1)
    steps = np.abs(np.diff(image[0], axis=1))
    assert (steps < 1e-9).mean() > 0.5 and (steps > 0.2).mean() > 0.02


def test_the_first_images_do_not_depend_on_the_number() -> None:
    assert np.array_equal(dead_leaves(2, 3, 16, 4)[:1], dead_leaves(1, 3, 16, 4))
