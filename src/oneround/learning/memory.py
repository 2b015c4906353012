"""What a client keeps of its own steps for later ones: a queue of its past features, and how its labels are spread.

Both live in tensors at fixed addresses, so that a recorded step goes on using them, and both are one client's alone: they are
emptied or filled anew when another client takes its turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oneround.learning.objective import Batch, Features
from oneround.sections import Queue

EMPTY = -1
TINY = 1e-8


class FeatureQueue:
    """The last so many features a client computed, the newest first; places not filled yet have the label −1."""

    def __init__(self, options: Queue, features: int, device: torch.device) -> None:
        self.options = options
        self.features = Features(
            torch.zeros(options.size, features, device=device),
            torch.full((options.size,), EMPTY, dtype=torch.int64, device=device),
        )
        self.open = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def live(self) -> dict[str, Tensor]:
        """All that is kept of it between epochs; live, not a copy."""
        return {"unit": self.features.unit, "labels": self.features.labels}

    def clear(self) -> None:
        self.features.unit.zero_()
        self.features.labels.fill_(EMPTY)

    def begin_epoch(self, epoch: int) -> None:
        """Features of the first epochs are not kept: they change too fast."""
        self.open.fill_(epoch >= self.options.warm_up)

    def push(self, batch: Batch) -> None:
        """Take the batch's features in; the oldest fall out."""
        size = len(self.features.labels)
        labels = torch.where(self.open, batch.labels, EMPTY)
        self.features.unit.copy_(torch.cat([batch.unit.detach(), self.features.unit])[:size])
        self.features.labels.copy_(torch.cat([labels, self.features.labels])[:size])


def log_prior(counts: Tensor) -> Tensor:
    """log of every class's share of a client's samples (classes,); a class it has none of is all but ruled out."""
    return ((counts.float() + TINY) / counts.sum()).log()
