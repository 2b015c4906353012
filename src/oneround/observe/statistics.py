"""Differences that can be trusted: paired over partitions, with an interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit


@dataclass(frozen=True)
class Summary:
    """Mean of n values with its range and, from two values on, a 95 % t-interval of half-width `margin`."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def margin(self) -> float | None:
        if len(self.values) < 2:
            return None
        count = len(self.values)
        return float(stdtrit(count - 1, 0.975)) * statistics.stdev(self.values) / math.sqrt(count)

    @property
    def distinguishable(self) -> bool:
        """Whether the interval leaves out 0: for paired differences, whether the two differ."""
        return self.margin is not None and abs(self.mean) > self.margin


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    """Differences partition by partition."""
    return Summary(tuple(a - b for a, b in zip(ours, theirs, strict=True)))
