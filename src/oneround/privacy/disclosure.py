"""What a site discloses besides its model: its class counts, exact, hidden or with noise."""

from __future__ import annotations

import math
import secrets
from typing import Any

import torch
from torch import Tensor

from oneround.config.sections import Noise, Reveal

INDEPENDENT_OF_COUNTS = ("epoch", "learning_rate", "loss", "network")
"""Keys of a history entry that do not depend on the class counts, as λ, entropy and steps do."""
INDEPENDENT_TROUBLE = "not-finite"
"""Others do: λ out of range tells of the label entropy, collapsed features that there is more than one class."""


def disclosed_counts(counts: Tensor, reveal: Reveal) -> Tensor:
    """(classes,) int64 to send: the exact counts, their sum spread evenly, or each count with noise, clipped at 0.

    The noise is discrete Laplace (two-sided geometric) of scale 1/ε, drawn from the operating system, because the server could subtract noise
    from a seed of the recipe.
    """
    if reveal.class_counts is True:
        return counts
    if isinstance(reveal.class_counts, Noise):
        noisy = counts + torch.tensor([_noise(reveal.class_counts.epsilon) for _ in counts])
        largest = noisy == noisy.max()  # an upload has at least one sample
        return torch.where(largest, noisy.clamp(min=1), noisy.clamp(min=0))
    share, rest = divmod(int(counts.sum()), len(counts))
    return torch.tensor([share + (label < rest) for label in range(len(counts))])


def disclosed_history(history: list[dict[str, Any]], reveal: Reveal) -> list[dict[str, Any]]:
    """The training history, without the entries that depend on undisclosed class counts."""
    if reveal.class_counts is True:
        return history
    disclosed = [{key: value for key, value in entry.items() if key in INDEPENDENT_OF_COUNTS} for entry in history]
    for entry, whole in zip(disclosed, history, strict=True):
        if INDEPENDENT_TROUBLE in whole.get("trouble", ()):
            entry["trouble"] = [INDEPENDENT_TROUBLE]
    return disclosed


def disclosed_stop(text: str, summary: str, reveal: Reveal) -> str:
    """Why a safeguard ended training: the full `text` with λ and losses only where exact class counts are disclosed."""
    if reveal.class_counts is True or not text:
        return text
    return f"{summary}; the figures stay at the site, in its log (reveal.class_counts)"


def _noise(epsilon: float) -> int:
    """P(k) ∝ exp(−ε|k|), as the difference of two geometric variables."""
    random = secrets.SystemRandom()
    one, other = (math.floor(math.log(1 - random.random()) / -epsilon) for _ in range(2))
    return one - other
