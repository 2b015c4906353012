"""Images from a generator: its velocity is followed from noise (time 1) to images (time 0), by Heun's method."""

from __future__ import annotations

import torch
from torch import Tensor

from oneround.models.unet import Generator


@torch.no_grad()
def sample(net: Generator, noise: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Images of these classes in uint8, from noise (n, channels, height, width).

    Every step takes two evaluations, the last one takes one: half of Heun's correction would be at time 0, where nothing was learned.
    """
    images, length = noise, 1 / steps
    for step in range(steps):
        time = torch.full((len(noise),), 1 - step * length, device=noise.device)
        velocity = net(images, time, labels).float()
        ahead = images - length * velocity
        if step + 1 < steps:
            velocity = (velocity + net(ahead, time - length, labels).float()) / 2
            ahead = images - length * velocity
        images = ahead
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
