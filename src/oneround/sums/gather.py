"""One pass over a site's images: a block's features are computed, added to the sums and discarded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.data import Images
from oneround.models.features import Features, in_batches
from oneround.sums.moments import Moments, check_memory, float64_device, mirror_

ROWS = 512  # images per block
COLUMNS = 1024  # of the Gram matrix per product, to bound temporary memory


def steps_of(images: int) -> int:
    """Number of blocks in a pass over that many images."""
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
    shift: int = 0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Moments:
    """The sums over a site's images: features in fp32, products and sums in float64, so results hardly depend on the partition.

    `mirrored`: the mirror image of every image counts too. `shift`: so do copies moved by so many pixels. `on_progress` receives the number of finished blocks.
    """
    device = data.pixels.device
    sum_device = float64_device(device)
    check_memory(features.size)
    sums = Moments.zero(features.size, classes, sum_device)
    blocks = zip(data.batches(device, mean, std, ROWS), data.labels.split(ROWS), strict=True)
    for done, (images, labels) in enumerate(blocks, start=1):
        for batch in _copies(images, mirrored, shift):
            outputs = in_batches(features, batch, features.batch_size, features.size)
            _add(sums, outputs.to(sum_device).double(), F.one_hot(labels.to(sum_device), classes).double())
        on_progress(done)
    mirror_(sums.gram)
    return sums


def _copies(images: Tensor, mirrored: bool, shift: int) -> Iterator[Tensor]:
    """The images and the copies that count beside them; what a shift uncovers repeats the border."""
    if not shift:
        yield images
        if mirrored:
            yield images.flip(3)
        return
    padded = F.pad(images, (shift,) * 4, mode="replicate")
    height, width = images.shape[2:]
    for down, right in [(0, 0), *itertools.product((-1, 1), repeat=2)]:
        top, left = shift * (1 + down), shift * (1 + right)
        moved = padded[:, :, top : top + height, left : left + width]
        yield moved
        if mirrored:
            yield moved.flip(3)


def _add(sums: Moments, outputs: Tensor, labels: Tensor) -> None:
    """Add one block; only the upper triangle of the Gram matrix is summed."""
    for start in range(0, outputs.shape[1], COLUMNS):
        end = start + COLUMNS
        sums.gram[start:end, start:] += outputs[:, start:end].T @ outputs[:, start:]
    sums.cross.add_(outputs.T @ labels)
    sums.total.add_(outputs.sum(0))
    sums.counts.add_(labels.sum(0))
