"""Sampling follows the velocity exactly where it is known, and costs what it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oneround.models.sampling import sample
from oneround.models.unet import Generator


class OneImage(Generator):
    """The velocity of a data set of one image: (x_t − c)/t; counts its evaluations."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.image, self.calls = image, list[float]()

    def forward(self, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        self.calls.append(float(times[0]))
        return (noisy - self.image) / times[:, None, None, None]


@pytest.mark.parametrize("steps", [1, 4, 20])
def test_noise_becomes_the_only_image(steps: int) -> None:
    pixels = torch.randint(0, 256, (1, 5, 6), generator=torch.Generator().manual_seed(1))
    net = OneImage(pixels / 127.5 - 1)
    made = sample(net, torch.randn(3, 1, 5, 6), torch.zeros(3, dtype=torch.int64), steps)
    assert made.dtype == torch.uint8 and (made == pixels).all()
    ends = [1 - step / steps for step in range(1, steps) for _ in range(2)]
    assert net.calls == pytest.approx([1.0, *ends]) and len(net.calls) == 2 * steps - 1


class Decay(Generator):
    """dx/dt = x: from x at time 1 to x/e at time 0."""

    def forward(self, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        return noisy


def test_more_steps_are_more_accurate() -> None:
    noise = torch.full((1, 1, 1, 1), 0.9)
    exact = (0.9 / torch.e + 1) * 127.5
    errors = [abs(float(sample(Decay(), noise, torch.zeros(1), steps)) - exact) for steps in (1, 2, 20)]
    assert errors[0] > 10 > errors[1] > 1 > errors[2]
