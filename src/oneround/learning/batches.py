"""Which samples make which batch: reshuffled every epoch, every sample used, fixed shapes where possible."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oneround.recipe import Training


def steps_per_epoch(samples: int, training: Training) -> int:
    """How many batches an epoch has."""
    size = training.batch_size
    if samples <= size:
        return min(samples, 1)
    return samples // size if training.last_batch == "drop" else math.ceil(samples / size)


def batches(samples: int, training: Training, generator: torch.Generator) -> list[Tensor]:
    """Sample numbers of every batch of one epoch.

    A client smaller than a batch has one batch of its own size. An incomplete last batch is filled from the start of the
    same shuffle (`wrap`), kept short (`keep`) or left out (`drop`).
    """
    order = torch.randperm(samples, generator=generator)
    size, steps = training.batch_size, steps_per_epoch(samples, training)
    if samples > size and training.last_batch == "wrap":
        order = torch.cat([order, order[: steps * size - samples]])
    return list(order.split(size))[:steps] if samples else []
