"""Scales of a chart's axes: positions of values, and round numbers for the ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps `low`…`high` to `start`…`end`, by value or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(each) if self.log else each for each in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def takes(self, value: float | None) -> bool:
        """Whether the axis can show this value: finite, and positive on a logarithmic axis."""
        return value is not None and math.isfinite(value) and (value > 0 or not self.log)

    @property
    def ticks(self) -> list[float]:
        return _powers(self.low, self.high) if self.log else _steps(self.low, self.high)


def scale_for(
    values: Iterable[float], start: float, end: float, *, log: bool = False, bounds: tuple[float, float] | None = None
) -> Scale:
    """A scale that holds these values (or `bounds`) and ends on round numbers."""
    fit = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = bounds or (min(fit, default=1.0), max(fit, default=1.0))
    if log:
        low, high = _round_down(low), _round_up(high)
        return Scale(low, high if high > low else 10 * low, start, end, True)
    if low == high:
        low, high = (low - 0.5, high + 0.5) if abs(low) < 1 else (low - abs(low) / 10, high + abs(high) / 10)
    if bounds is None:
        step = _step(low, high)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Scale(low, high, start, end)


def _round_down(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, … at or below."""
    power = 10.0 ** math.floor(math.log10(value))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, … at or above."""
    power = 10.0 ** math.floor(math.log10(value))
    return min(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _step(low: float, high: float) -> float:
    """1, 2 or 5 times a power of ten, for about five steps."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _steps(low: float, high: float) -> list[float]:
    step = _step(low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten; between few of them also their double and fivefold or even steps, of many only some."""
    if high <= 5 * low:
        return _steps(low, high)
    bottom, top = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    factors = (1, 2, 5) if top - bottom <= 2 else (1,)
    every = max(1, math.ceil((top - bottom) / 6))
    marks = [factor * 10.0**power for power in range(bottom, top + 1, every) for factor in factors]
    return [mark for mark in marks if low * (1 - 1e-9) <= mark <= high * (1 + 1e-9)]


def tick_label(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:g}"
