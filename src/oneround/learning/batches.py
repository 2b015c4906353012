"""Which samples make which batch: reshuffled every epoch, every sample used, fixed shapes where possible."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oneround.sections import Training


def steps_per_epoch(samples: int, training: Training) -> int:
    """How many batches an epoch has."""
    size = training.batch_size
    if samples <= size:
        return min(samples, 1)
    return samples // size if training.last_batch == "drop" else math.ceil(samples / size)


def batches(labels: Tensor, training: Training, generator: torch.Generator) -> list[Tensor]:
    """Sample numbers of every batch of one epoch; labels (n,).

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
    """As many sample numbers as there are samples, every class that is there equally often (give or take one), evenly mixed.

    Samples of a class come round in shuffled turns: all of them before any comes again.
    """
    present = labels.unique()
    shares = [len(labels) // len(present) + (number < len(labels) % len(present)) for number in range(len(present))]
    order = torch.randperm(len(present), generator=generator)
    drawn, places = [], []
    for label, share in zip(present[order], shares, strict=True):
        members = torch.nonzero(labels == label)[:, 0]
        turns = [members[torch.randperm(len(members), generator=generator)] for _ in range(-(-share // len(members)))]
        drawn.append(torch.cat(turns)[:share])
        places.append((torch.arange(share) + torch.rand(share, generator=generator)) / share)
    return torch.cat(drawn)[torch.cat(places).argsort()]
