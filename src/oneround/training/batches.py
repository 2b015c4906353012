"""Batches of an epoch: reshuffled every epoch, every sample used, fixed shapes where possible."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oneround.config.sections import Training


def steps_per_epoch(samples: int, training: Training) -> int:
    """Number of batches in an epoch."""
    size = training.batch_size
    if samples <= size:
        return min(samples, 1)
    return samples // size if training.last_batch == "drop" else math.ceil(samples / size)


def batches(labels: Tensor, training: Training, generator: torch.Generator) -> list[Tensor]:
    """Sample indices of every batch of one epoch; labels (n,).

    A client smaller than a batch has one batch of its own size. An incomplete last batch is filled from the start of the
    same shuffle (`wrap`), kept short (`keep`) or left out (`drop`).
    """
    samples = len(labels)
    balanced = training.sampling == "balanced"
    order = _balanced(labels, generator) if balanced else torch.randperm(samples, generator=generator)
    size, steps = training.batch_size, steps_per_epoch(samples, training)
    if samples > size and training.last_batch == "wrap":
        order = torch.cat([order, order[: steps * size - samples]])
    return list(order.split(size))[:steps] if samples else []


def _balanced(labels: Tensor, generator: torch.Generator) -> Tensor:
    """n sample indices in which every present class is equally frequent (up to one) and evenly mixed.

    Samples of a class repeat in shuffled passes: each is used once before any is repeated.
    """
    present = labels.unique()
    shares = [len(labels) // len(present) + (number < len(labels) % len(present)) for number in range(len(present))]
    order = torch.randperm(len(present), generator=generator)
    drawn, positions = [], []
    for label, share in zip(present[order], shares, strict=True):
        members = torch.nonzero(labels == label)[:, 0]
        passes = [members[torch.randperm(len(members), generator=generator)] for _ in range(-(-share // len(members)))]
        drawn.append(torch.cat(passes)[:share])
        positions.append((torch.arange(share) + torch.rand(share, generator=generator)) / share)
    return torch.cat(drawn)[torch.cat(positions).argsort()]
