"""One pass over images adds their features up and forgets them."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from oneround import acts
from oneround.data import Dataset, Images
from oneround.models.features import Features
from oneround.protocol import Upload
from oneround.site import Site
from oneround.sums import gather, steps_of, unpacked
from oneround.sums.gather import ROWS
from small_sums import broadcast_of


def test_features_are_never_all_in_memory() -> None:
    """However many images: of the features, at most a block and what is being added to it are alive."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Counted(Features):
        size = 8

        def forward(self, images: Tensor) -> Tensor:
            nonlocal most
            most = max(most, sum(len(seen) for ref in alive if (seen := ref()) is not None))
            outputs = images.flatten(1)[:, :8].clone()
            alive.append(weakref.ref(outputs))
            return outputs

    pixels = torch.randint(0, 256, (6 * ROWS + 7, 1, 8, 8), dtype=torch.uint8)
    moments = gather(Counted(), Images(pixels, torch.zeros(len(pixels), dtype=torch.int64)), 2, 0.5, 0.5)
    assert most <= ROWS and len(alive) > 12
    images = ((pixels.double() / 255 - 0.5) / 0.5).flatten(1)[:, :8]
    assert torch.allclose(moments.gram, images.T @ images, rtol=1e-5, atol=1e-3)


@pytest.mark.slow
def test_mirrored_copies_count_as_images(digits: Dataset) -> None:
    broadcast = broadcast_of(digits, sums__mirror="copies")
    mine = digits.train.take(np.arange(50))
    moments = unpacked(acts.train(broadcast, Site("site", mine)).sums)
    both = Images(torch.cat([mine.pixels, mine.pixels.flip(3)]), mine.labels.repeat(2))
    expected = unpacked(acts.train(broadcast_of(digits, sums__mirror="none"), Site("site", both)).sums)
    assert torch.allclose(moments.gram, expected.gram, rtol=1e-5) and float(moments.counts.sum()) == 100


def test_moved_copies_count_as_images(digits: Dataset) -> None:
    mine = digits.train.take(np.arange(30))
    upload = acts.train(broadcast_of(digits, sums__shift=1), Site("site", mine))
    padded = np.pad(mine.pixels.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), "edge")
    moved = [padded[:, :, top : top + 8, left : left + 8] for top, left in ((1, 1), (0, 0), (0, 2), (2, 0), (2, 2))]
    all_five = Images(torch.from_numpy(np.concatenate(moved)), mine.labels.repeat(5))
    expected = unpacked(acts.train(broadcast_of(digits), Site("site", all_five)).sums)
    moments = unpacked(upload.sums)
    assert torch.allclose(moments.gram, expected.gram, rtol=1e-5) and torch.equal(moments.counts, expected.counts)
    assert upload.samples == 30 and Upload.unpack(upload.pack(), broadcast_of(digits, sums__shift=1), {}).samples == 30


def test_progress_counts_the_blocks_of_a_pass() -> None:
    class First(Features):
        size = 2

        def forward(self, images: Tensor) -> Tensor:
            return images.flatten(1)[:, :2]

    done: list[int] = []
    n = ROWS + 1
    data = Images(torch.full((n, 1, 8, 8), 255, dtype=torch.uint8), torch.arange(n) % 3)
    moments = gather(First(), data, 3, 0.5, 0.5, on_progress=done.append)
    assert done == [1, 2] and steps_of(n) == 2 and steps_of(ROWS) == 1
    assert moments.gram.tolist() == [[n, n], [n, n]] and moments.total.tolist() == [n, n] and moments.samples == n
    assert torch.equal(moments.cross, moments.counts.expand(2, 3)), "features of 1, summed by class"
