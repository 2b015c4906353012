"""The moving average does what its formula says."""

from __future__ import annotations

import torch
from torch import nn

from oneround.training.averaging import MovingAverage


def test_the_average_forgets_where_it_began_and_then_moves_slowly() -> None:
    weight = nn.Parameter(torch.zeros(2))
    average, expected = MovingAverage({"w": weight}, 0.5), torch.zeros(2)
    for step in range(1, 30):
        weight.data += torch.tensor([1.0, -2.0])
        average.update(torch.tensor(float(step)))
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight.detach()
    torch.testing.assert_close(average.live["w"], expected)
    assert abs(float(average.live["w"][0]) - 28) < 1e-3, "half of the way behind each step of 1: one step behind"
