"""Paired differences over partitions: t-interval and t-test, Holm's correction for several comparisons, and power.

Power averages over the distribution of the estimated standard deviation, since SciPy's non-central t has gaps.
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
MOST_PAIRS = 10_000  # more than anybody will run
PAIRS = 3  # fewer decide nothing about a published figure
CLOSE = 2.0  # points: an interval no wider than this around our figure that holds the published one reproduces it
REPRODUCED, REFUTED = "reproduced", "refuted"
ROUNDING = 1e-9  # points; a smaller deviation is rounding


@dataclass(frozen=True)
class Summary:
    """Mean of n values and, from two values on, its 95 % t-interval with half-width `margin`."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def margin(self) -> float | None:
        count = len(self.values)
        if count < 2:
            return None
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
    """How many comparisons were made together."""
    corrected: float | None = None
    """p after Holm's correction for all of them; None with fewer than two pairs."""

    @property
    def p(self) -> float | None:
        """Two-sided paired t-test."""
        return p_value(self.difference)

    @property
    def effect(self) -> float | None:
        """Mean difference in standard deviations of the differences (Cohen's d_z)."""
        deviation = _deviation(self.difference)
        return self.difference.mean / deviation if deviation else None

    @property
    def significant(self) -> bool:
        return self.corrected is not None and self.corrected < LEVEL

    def verdict(self, interest: float = 1.0) -> str:
        """The comparison in words; `interest` is the smallest difference, in points, that would matter."""
        pairs, mean = len(self.difference.values), self.difference.mean
        if self.corrected is None:
            return f"{mean:+.1f} on one partition: says nothing about others"
        if self.significant:
            return f"{'better' if mean > 0 else 'worse'} by {abs(mean):.1f} points (p = {self.corrected:.2g} with {pairs} pairs)"
        deviation = _deviation(self.difference)
        if not deviation:
            return f"{mean:+.1f} on each of {pairs} partitions: too few to say how much it varies"
        needed = pairs_needed(deviation, interest, LEVEL / self.comparisons)
        difference = plural(interest, "point")
        if needed <= pairs:
            return f"not distinguishable with {pairs} pairs, enough to see {difference}"
        how_many = f"about {needed}" if needed < MOST_PAIRS else f"more than {MOST_PAIRS:,}"
        return f"not distinguishable with {pairs} pairs; {how_many} would be needed to see {difference}"


def _deviation(summary: Summary) -> float | None:
    """Standard deviation, 0 where it is only rounding; None with one value."""
    if len(summary.values) < 2:
        return None
    deviation = statistics.stdev(summary.values)
    return deviation if deviation > ROUNDING else 0.0


def p_value(difference: Summary) -> float | None:
    """Two-sided t-test that the mean difference is 0, a sign test where all differences are equal; None with one pair."""
    count, deviation = len(difference.values), _deviation(difference)
    if deviation is None:
        return None
    if deviation == 0:
        return 1.0 if abs(difference.mean) <= ROUNDING else 2.0 ** (1 - count)
    return float(2 * stdtr(count - 1, -abs(difference.mean) / deviation * math.sqrt(count)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected so that the probability of any false alarm among them stays at the level (Holm, 1979)."""
    corrected, so_far = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[number]))
        corrected[number] = so_far
    return corrected


def compare_paired(differences: Sequence[Summary]) -> list[Comparison]:
    """Comparisons of several methods with one baseline, Holm-corrected together."""
    p_values = [p for each in differences if (p := p_value(each)) is not None]
    corrected = iter(holm(p_values))
    return [Comparison(each, len(p_values), next(corrected) if len(each.values) > 1 else None) for each in differences]


def compare_decisive(differences: Sequence[Summary]) -> list[Comparison]:
    """As `compare_paired`, of those with enough pairs to decide something; the others are not tested."""
    tested = iter(compare_paired([each for each in differences if len(each.values) >= PAIRS]))
    return [next(tested) if len(each.values) >= PAIRS else Comparison(each) for each in differences]


def agrees(apart: Summary) -> bool:
    """Whether ours minus a published figure is 0, and known well enough to say so."""
    margin = apart.margin
    return len(apart.values) >= PAIRS and margin is not None and abs(apart.mean) <= margin <= CLOSE


def figure_verdict(apart: Comparison) -> str:
    """Whether ours minus a published figure refutes it, reproduces it, or decides nothing."""
    if apart.significant:
        return REFUTED
    return REPRODUCED if agrees(apart.difference) else f"undecidable, n = {len(apart.difference.values)}"


def power(deviation: float, difference: float, pairs: int, level: float = LEVEL) -> float:
    """Probability that a paired t-test detects a true mean difference, given the standard deviation of the differences."""
    shift = abs(difference) / deviation * math.sqrt(pairs) if deviation else math.inf
    critical = float(stdtrit(pairs - 1, 1 - level / 2))
    # Quantiles of the estimated over the true deviation.
    estimates = np.sqrt(2 / (pairs - 1) * gammaincinv((pairs - 1) / 2, (np.arange(1000) + 0.5) / 1000))
    return float(np.mean(ndtr(shift - critical * estimates) + ndtr(-shift - critical * estimates)))


def pairs_needed(deviation: float, difference: float, level: float = LEVEL) -> int:
    """The smallest number of pairs that detects this difference with a power of 80 %, at most `MOST_PAIRS`."""
    low, high = 2, 2
    while high < MOST_PAIRS and power(deviation, difference, high, level) < POWER:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if power(deviation, difference, middle, level) >= POWER else (middle + 1, high)
    return min(low, MOST_PAIRS)
