"""A scoring session: values that the scoring of one run computes once, however many rules and snapshots use them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class ScoringSession:
    """A small cache by purpose and key; it lives as long as one scoring."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Hashable, Any]] = {}

    def once(self, purpose: str, key: Hashable, compute: Callable[[], T], keep: int = 1) -> T:
        """Return the value of that key, computing it the first time; each purpose keeps its last `keep` values."""
        known = self._known.setdefault(purpose, {})
        if key not in known:
            value = compute()
            while len(known) >= keep:
                known.pop(next(iter(known)))
            known[key] = value
        cached: T = known[key]
        return cached
