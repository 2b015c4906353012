"""Numbers as people say them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`45 s`, `110 s`, `12 min`, `3.4 h`"""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size_in_words(count: float) -> str:
    """`45 MB`"""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
