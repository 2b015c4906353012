"""What the files of a run must hold to be read: they can be damaged, edited, or cut off by a kill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def sound_event(event: Any) -> dict[str, Any] | None:
    """An event that has what its kind promises, without gradients or a validation score that are none; None for any other."""
    if not isinstance(event, dict) or not isinstance(event.get("epoch"), int):
        return None
    kind = event.get("event")
    whose = "rule" if kind in ("snapshot", "fusion") else "client"
    if not isinstance(kind, str) or not isinstance(event.get(whose), str):
        return None
    if kind in ("client", "snapshot") and not is_share(event.get("accuracy")):
        return None
    gradients = event.get("gradients", {})
    if not (isinstance(gradients, dict) and all(map(_has_cosines, gradients.values()))):
        event.pop("gradients")
    if not is_share(event.get("validation", 0)):
        event.pop("validation")
    return event


def is_share(value: Any) -> bool:
    """A finite number from 0 to 1."""
    return is_number(value) and 0 <= value <= 1


def _has_cosines(there: Any) -> bool:
    cosines = there.get("cosine") if isinstance(there, dict) else None
    return isinstance(cosines, dict) and all(value is None or is_number(value) for value in cosines.values())


def is_table(rows: Any) -> bool:
    """Whether these are rows of counts."""
    return isinstance(rows, list) and all(
        isinstance(row, list) and all(isinstance(count, int) and count >= 0 for count in row) for row in rows
    )


def fault_of_result(told: Mapping[str, Any]) -> str | None:
    """What is wrong with a result, in words."""
    if not isinstance(told["partition"], str) or not isinstance(told["remarks"], list):
        return "its partition must be text and its remarks a list"
    if not isinstance(told["uploads"], dict) or (told["clients"] and not told["rules"]):
        return "no rules, or uploads that are no mapping"
    for key in ("rules", "clients"):
        if not isinstance(told[key], dict):
            return f"{key} is no mapping"
        for name, score in told[key].items():
            accuracy = score.get("accuracy") if isinstance(score, dict) else None
            if not is_share(accuracy):
                return f"{key}.{name} has no accuracy from 0 to 1"
            confusion, shares = score.get("confusion", []), score.get("per_class", [])
            if not is_table(confusion) or any(len(row) != len(confusion) for row in confusion):
                return f"the confusion of {key}.{name} is no square table of counts"
            if (
                not isinstance(shares, list)
                or not all(share is None or is_number(share) for share in shares)
                or len(shares) != len(confusion)
            ):
                return f"per_class of {key}.{name} is no list of shares, one for each class"
    return None
