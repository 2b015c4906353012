"""One pass over a site's images: features of a few images at a time, added into the sums and forgotten."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.data import Images
from oneround.models.features import Features, in_parts
from oneround.sums.moments import Moments, check_room, exact, mirror_

ROWS = 512  # images whose features are held at a time
COLUMNS = 1024  # of the Gram matrix are worked on at a time, so what a product needs stays small


def steps_of(images: int) -> int:
    """How many blocks a pass over that many images has."""
    return math.ceil(images / ROWS)


@torch.inference_mode()
def gather(
    features: Features,
    data: Images,
    classes: int,
    mean: float,
    std: float,
    *,
    mirrored: bool = False,
    told: Callable[[int], None] = lambda done: None,
) -> Moments:
    """The sums over a site's images; features in fp32, products and sums in float64, which hardly any partition can disturb.

    `mirrored`: the mirror image of every image counts too. `told` hears how many blocks are done.
    """
    device = data.pixels.device
    where = exact(device)
    check_room(features.size)
    sums = Moments.zero(features.size, classes, where)
    for done, labels in enumerate(data.labels.split(ROWS)):
        images = (data.pixels[done * ROWS : done * ROWS + ROWS].float() / 255 - mean) / std
        for flipped in (False, True) if mirrored else (False,):
            given = images.flip(3) if flipped else images
            seen = in_parts(features, given, features.at_once, features.size)
            _add(sums, seen.to(where).double(), F.one_hot(labels.to(where), classes).double())
        told(done + 1)
    mirror_(sums.gram)
    return sums


def _add(sums: Moments, seen: Tensor, labels: Tensor) -> None:
    """Only the upper triangle of the Gram matrix is summed."""
    for start in range(0, seen.shape[1], COLUMNS):
        end = start + COLUMNS
        sums.gram[start:end, start:] += seen[:, start:end].T @ seen[:, start:]
    sums.cross.add_(seen.T @ labels)
    sums.total.add_(seen.sum(0))
    sums.counts.add_(labels.sum(0))
