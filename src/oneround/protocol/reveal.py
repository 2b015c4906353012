"""What a site tells of itself besides what it learned: its class counts, as they are, hidden or with noise."""

from __future__ import annotations

import math
import secrets
from typing import Any

import torch
from torch import Tensor

from oneround.sections import Noise, Reveal

HARMLESS = ("epoch", "learning_rate", "loss", "trouble")  # of a history; λ, entropy, steps say something of the counts


def told_counts(counts: Tensor, reveal: Reveal) -> Tensor:
    """(classes,) int64 to send: the counts; their sum spread evenly; or each with noise, cut off at 0.

    The noise is a discrete Laplace (two-sided geometric) one of scale 1/ε and comes from the operating system: from a seed of
    the recipe the server could take it off again.
    """
    if reveal.class_counts is True:
        return counts
    if isinstance(reveal.class_counts, Noise):
        noisy = counts + torch.tensor([_noise(reveal.class_counts.epsilon) for _ in counts])
        some = noisy == noisy.max()  # an upload stands for at least one sample
        return torch.where(some, noisy.clamp(min=1), noisy.clamp(min=0))
    every, rest = divmod(int(counts.sum()), len(counts))
    return torch.tensor([every + (label < rest) for label in range(len(counts))])


def told_history(history: list[dict[str, Any]], reveal: Reveal) -> list[dict[str, Any]]:
    """What training measured, without what would say again what is not to be said."""
    if reveal.class_counts is True:
        return history
    return [{key: value for key, value in entry.items() if key in HARMLESS} for entry in history]


def _noise(epsilon: float) -> int:
    """P(k) ∝ exp(−ε|k|), as the difference of two geometric numbers."""
    random = secrets.SystemRandom()
    one, other = (math.floor(math.log(1 - random.random()) / -epsilon) for _ in range(2))
    return one - other
