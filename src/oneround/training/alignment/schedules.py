"""Schedules s(p) of the weight of alignment over the *whole* training, p = epoch/epochs from 0 to 1; constant in an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from oneround.config.parts import Needs, Part, Slot


class Schedule(Part):
    """A factor that starts at 1."""

    def factor(self, progress: float, consensus: float) -> float:
        """s at `progress`; `consensus`: current spread of the clients' prototypes over the first one, at most 1."""
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

    @property
    def needs(self) -> Needs:
        return Needs(other_clients=True)

    def factor(self, progress: float, consensus: float) -> float:
        return consensus


def spread(prototypes: Iterable[Tensor]) -> float:
    """Mean over entries of the standard deviation across clients; prototypes of each client (classes, features)"""
    return float(torch.stack(list(prototypes)).std(0, correction=0).mean())


def consensus(spreads: Mapping[int, float], epochs_done: int) -> float:
    """min(1, S/S₀) after `epochs_done` epochs, from the spread after each epoch; S₀ is the first one, since all start equal."""
    if epochs_done not in spreads or not spreads[min(spreads)]:
        return 1.0
    return min(1.0, spreads[epochs_done] / spreads[min(spreads)])
