"""The metrics log: one JSON object a line, appended as things happen; greppable, and what a resumed run reads back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class MetricsLog:
    """`metrics.jsonl` of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, events: Iterable[Event]) -> None:
        """Write events in one piece and push them to the disk: after a kill either all are there or a torn last line."""
        text = "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Event]:
        if not self.path.is_file():
            return
        for line in self.path.read_bytes().splitlines():
            try:
                event = _sound(json.loads(line))
            except ValueError:
                continue  # the torn line of a killed run
            if event is not None:
                yield event

    def keep(self, events: Iterable[Event]) -> None:
        """Replace the log by these events."""
        text = "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sound(event: Any) -> Event | None:
    """An event that has what its kind promises, without gradients or a validation score that are none; None for any other."""
    if not isinstance(event, dict) or not isinstance(event.get("epoch"), int):
        return None
    kind = event.get("event")
    if not isinstance(kind, str) or not isinstance(event.get("rule" if kind == "snapshot" else "client"), str):
        return None
    if kind in ("client", "snapshot") and not _is_share(event.get("accuracy")):
        return None
    gradients = event.get("gradients", {})
    if not (isinstance(gradients, dict) and all(map(_has_cosines, gradients.values()))):
        event.pop("gradients")
    if not _is_share(event.get("validation", 0)):
        event.pop("validation")
    return event


def _is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def _has_cosines(there: Any) -> bool:
    cosines = there.get("cosine") if isinstance(there, dict) else None
    return isinstance(cosines, dict) and all(value is None or is_number(value) for value in cosines.values())
