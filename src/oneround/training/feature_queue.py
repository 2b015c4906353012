"""A queue of a client's past features, as further negatives of a contrastive loss.

It lives in tensors at fixed addresses, so that a recorded step uses the current values. It belongs to one client and is cleared
for the next.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from oneround.config.sections import Queue
from oneround.training.objective import Batch, Features

EMPTY = -1


class FeatureQueue:
    """A client's most recent features, the newest first; empty slots have the label −1."""

    def __init__(self, options: Queue, features: int, device: torch.device, lead: tuple[int, ...] = ()) -> None:
        """`lead`: (clients,) where a step has several clients, each with a queue."""
        self.options = options
        self.features = Features(
            torch.zeros(*lead, options.size, features, device=device),
            torch.full((*lead, options.size), EMPTY, dtype=torch.int64, device=device),
        )
        self.open = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def live(self) -> dict[str, Tensor]:
        """Its state between epochs; live tensors, not a copy."""
        return {"unit": self.features.unit, "labels": self.features.labels}

    def client(self, number: int) -> FeatureQueue:
        """One client's queue, of several; the same tensors."""
        view = copy(self)
        view.features = Features(self.features.unit[number], self.features.labels[number])
        return view

    def clear(self) -> None:
        self.features.unit.zero_()
        self.features.labels.fill_(EMPTY)

    def begin_epoch(self, epoch: int) -> None:
        """Keep features only after the warm-up: those of the first epochs change too fast."""
        self.open.fill_(epoch >= self.options.warm_up)

    def push(self, batch: Batch) -> None:
        """Push the batch's features; the oldest are dropped."""
        size = self.options.size
        labels = torch.where(self.open, batch.labels, EMPTY)
        self.features.unit.copy_(torch.cat([batch.unit.detach(), self.features.unit], -2)[..., :size, :])
        self.features.labels.copy_(torch.cat([labels, self.features.labels], -1)[..., :size])
