"""Numbers for people and for JSON."""

from __future__ import annotations

import math
from typing import Any


def duration(seconds: float) -> str:
    """`45 s`, `110 s`, `12 min`, `3.4 h`"""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plural(count: float, noun: str) -> str:
    """`1 partition`, `5 partitions`"""
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def format_bytes(count: float) -> str:
    """`45 MB`"""
    unit = "bytes"
    for larger in ("kB", "MB", "GB"):
        if count >= 1000:
            count, unit = count / 1000, larger
    return f"{count:.0f} {unit}" if unit == "bytes" or count >= 10 else f"{count:.1f} {unit}"


def without_infinity(data: Any) -> Any:
    """Plain data for JSON, which has no infinity and no NaN: None replaces numbers that are not finite."""
    if isinstance(data, dict):
        return {key: without_infinity(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [without_infinity(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
