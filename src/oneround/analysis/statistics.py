"""Paired differences over partitions: interval, test, and how many pairs a difference needs to be seen.

The t-interval and t-test of paired differences; Holm's correction for several comparisons; power by averaging over the
estimates of the spread (instead of SciPy's non-central t, which has gaps).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaincinv, ndtr, stdtr, stdtrit

from oneround.formatting import plural

LEVEL = 0.05  # of the tests and, as 1 − LEVEL, of the intervals
POWER = 0.8
MANY = 10_000  # more pairs than anybody will run
NOTHING = 1e-9  # points; a spread below it is rounding


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
        return float(stdtrit(count - 1, 1 - LEVEL / 2)) * statistics.stdev(self.values) / math.sqrt(count)

    def __format__(self, spec: str) -> str:
        """`70.3 ± 2.1` of `.1f`, the mean alone where there is one value; the spec is that of a number."""
        margin = "" if self.margin is None else f" ± {format(self.margin, spec.removeprefix('+'))}"
        return format(self.mean, spec) + margin

    @property
    def distinguishable(self) -> bool:
        """Whether the interval leaves out 0: for paired differences, whether the two differ."""
        return self.margin is not None and abs(self.mean) > self.margin


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    """Differences partition by partition."""
    return Summary(tuple(a - b for a, b in zip(ours, theirs, strict=True)))


@dataclass(frozen=True)
class Comparison:
    """A paired difference in percentage points, tested."""

    difference: Summary
    comparisons: int = 1
    """How many were made together."""
    corrected: float | None = None
    """p after Holm's correction for all of them; None with fewer than two pairs."""

    @property
    def p(self) -> float | None:
        """Two-sided paired t-test."""
        return p_value(self.difference)

    @property
    def effect(self) -> float | None:
        """Mean difference in standard deviations of the differences (Cohen's d_z)."""
        spread = _deviation(self.difference)
        return self.difference.mean / spread if spread else None

    @property
    def real(self) -> bool:
        return self.corrected is not None and self.corrected < LEVEL

    def verdict(self, interest: float = 1.0) -> str:
        """The comparison in words; `interest` is the smallest difference, in points, that would matter."""
        pairs, mean = len(self.difference.values), self.difference.mean
        if self.corrected is None:
            return f"{mean:+.1f} on one partition: says nothing about others"
        if self.real:
            return f"{'better' if mean > 0 else 'worse'} by {abs(mean):.1f} points (p = {self.corrected:.2g} with {pairs} pairs)"
        spread = _deviation(self.difference)
        if not spread:
            return f"{mean:+.1f} on each of {pairs} partitions: too few to say how much it varies"
        needed = pairs_needed(spread, interest, LEVEL / self.comparisons)
        difference = plural(interest, "point")
        if needed <= pairs:
            return f"not distinguishable with {pairs} pairs, enough to see {difference}"
        how_many = f"about {needed}" if needed < MANY else f"more than {MANY:,}"
        return f"not distinguishable with {pairs} pairs; {how_many} would be needed to see {difference}"


def _deviation(summary: Summary) -> float | None:
    if len(summary.values) < 2:
        return None
    spread = statistics.stdev(summary.values)
    return spread if spread > NOTHING else 0.0


def p_value(difference: Summary) -> float | None:
    """Two-sided t-test that the mean difference is 0, a sign test where the differences are all the same; None with one pair."""
    count, spread = len(difference.values), _deviation(difference)
    if spread is None:
        return None
    if spread == 0:
        return 1.0 if abs(difference.mean) <= NOTHING else 2.0 ** (1 - count)
    return float(2 * stdtr(count - 1, -abs(difference.mean) / spread * math.sqrt(count)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted so that the chance of even one false alarm among them stays at the level (Holm, 1979)."""
    corrected, so_far = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[number]))
        corrected[number] = so_far
    return corrected


def compared(differences: Sequence[Summary]) -> list[Comparison]:
    """Several comparisons with one baseline, tested together."""
    p_values = [p_value(each) for each in differences]
    adjusted = iter(holm([p for p in p_values if p is not None]))
    tested = len([p for p in p_values if p is not None])
    return [
        Comparison(each, tested, next(adjusted) if p is not None else None)
        for each, p in zip(differences, p_values, strict=True)
    ]


def power(deviation: float, difference: float, pairs: int, level: float = LEVEL) -> float:
    """Chance that a paired t-test sees a true mean difference, given the standard deviation of differences."""
    shift = abs(difference) / deviation * math.sqrt(pairs) if deviation else math.inf
    critical = float(stdtrit(pairs - 1, 1 - level / 2))
    estimates = np.sqrt(
        2 / (pairs - 1) * gammaincinv((pairs - 1) / 2, (np.arange(1000) + 0.5) / 1000)
    )  # of the deviation, over it
    return float(np.mean(ndtr(shift - critical * estimates) + ndtr(-shift - critical * estimates)))


def pairs_needed(deviation: float, difference: float, level: float = LEVEL) -> int:
    """The number of pairs that see that difference with a power of 80 %; `level` is corrected where several are tested together."""
    low, high = 2, 2
    while high < MANY and power(deviation, difference, high, level) < POWER:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if power(deviation, difference, middle, level) >= POWER else (middle + 1, high)
    return min(low, MANY)
