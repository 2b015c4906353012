"""The metrics log: one JSON object a line, appended as things happen; greppable, and what a resumed run reads back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from oneround.observe.sound import sound_event

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
                event = sound_event(json.loads(line))
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
