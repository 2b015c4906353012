"""s(p): how the pull of alignment changes over the *whole* training, p = epoch/epochs from 0 to 1; never anew in an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oneround.parts import Part, Slot


class Schedule(Part):
    """A factor that starts at 1."""

    needs_others: ClassVar[bool] = False
    """Whether it looks at other clients while they train, which one round does not allow: simulation only."""

    def factor(self, progress: float, consensus: float) -> float:
        """s at `progress`; `consensus`: spread of the clients' prototypes now over what it was at first, at most 1."""
        raise NotImplementedError


schedules: Slot[Schedule] = Slot("schedule", Schedule)


@schedules.register("constant")
class Constant(Schedule):
    """s = 1."""

    def factor(self, progress: float, consensus: float) -> float:
        return 1.0


@schedules.register("linear")
class Linear(Schedule):
    """s = 1 − p."""

    def factor(self, progress: float, consensus: float) -> float:
        return 1.0 - progress


@schedules.register("cosine")
class Cosine(Schedule):
    """s = (1 + cos πp)/2."""

    def factor(self, progress: float, consensus: float) -> float:
        return (1.0 + math.cos(math.pi * progress)) / 2


@schedules.register("consensus")
class Consensus(Schedule):
    """s = min(1, S/S₀): S the mean over entries of the standard deviation of the prototypes across clients."""

    needs_others: ClassVar[bool] = True

    def factor(self, progress: float, consensus: float) -> float:
        return consensus


def spread(prototypes: Iterable[Tensor]) -> float:
    """Mean over entries of the standard deviation across clients; prototypes of each client (classes, features)"""
    return float(torch.stack(list(prototypes)).std(0, correction=0).mean())


def consensus(spreads: Mapping[int, float], epochs_done: int) -> float:
    """min(1, S/S₀) after so many epochs, from the spread after each; S₀ is the first one, since all begin at one point."""
    if epochs_done not in spreads or not spreads[min(spreads)]:
        return 1.0
    return min(1.0, spreads[epochs_done] / spreads[min(spreads)])
