"""The metrics log, one JSON object a line, and its parser: events become the history of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneround.files import write_durably
from oneround.runs.integrity import is_number, valid_entry, valid_event

Event = dict[str, Any]
EpochMetrics = Mapping[str, Any]
"""Training metrics of a client in one epoch."""
Curves = dict[str, dict[int, float]]
"""Rule or client → epoch → value."""


def best_epoch(curve: Mapping[int, float]) -> int:
    """The epoch with the highest value, the earliest of equals."""
    return max(curve, key=lambda epoch: (curve[epoch], -epoch))


class MetricsLog:
    """`metrics.jsonl` of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, events: Iterable[Event]) -> None:
        """Write events in one piece and flush them to the disk: a kill leaves all of them, or a torn last line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_lines(events))
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Event]:
        """Every valid event; damaged lines are skipped."""
        if not self.path.is_file():
            return
        for line in self.path.read_bytes().splitlines():
            try:
                event = valid_event(json.loads(line))
            except ValueError:
                continue  # the torn line of a killed run
            if event is not None:
                yield event

    def keep(self, events: Iterable[Event]) -> None:
        """Replace the log by these events."""
        write_durably(self.path, _lines(events).encode())


def _lines(events: Iterable[Event]) -> str:
    return "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events)


@dataclass
class Measurements:
    """The measurements of a run so far. Accuracies are shares from 0 to 1."""

    epochs: dict[str, dict[int, EpochMetrics]] = field(default_factory=dict)
    """Client → epoch → metrics of its training."""
    curves: Curves = field(default_factory=dict)
    """Rule → epoch → test accuracy of the fused model."""
    validation: Curves = field(default_factory=dict)
    """Rule → epoch → accuracy on the validation images; empty where there are none."""
    local_accuracy: Curves = field(default_factory=dict)
    """Client → epoch → test accuracy of its own model."""
    fusions: dict[str, dict[int, Event]] = field(default_factory=dict)
    """Rule → epoch → metrics of a rule that acts between rounds."""
    elapsed: dict[int, float] = field(default_factory=dict)
    """Epoch → seconds since the start, at its snapshot."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Measurements:
        """Parse events; the later of two about the same thing counts. Clients and their epochs come out sorted.

        >>> Measurements.of([{"event": "snapshot", "epoch": 3, "rule": "iffi", "accuracy": 0.5}]).curves
        {'iffi': {3: 0.5}}
        """
        measured = cls()
        for event in events:
            measured.add(event)
        measured.epochs = {client: dict(sorted(by.items())) for client, by in sorted(measured.epochs.items())}
        return measured

    def add(self, event: Event) -> None:
        """Add one event: a line of the log, or the snapshot of a run under way, which carries its lines as `logged`.

        An event without the keys of its kind is ignored.
        """
        for line in event.get("logged", ()):
            self.add(line)
        valid = valid_event(event)
        if valid is None:
            return
        kind, epoch = valid["event"], valid["epoch"]
        if kind == "epoch":
            self.epochs.setdefault(valid["client"], {})[epoch] = valid_entry(valid)
        elif kind == "client":
            self.local_accuracy.setdefault(valid["client"], {})[epoch] = valid["accuracy"]
        elif kind == "fusion":
            facts = {name: value for name, value in valid.items() if name not in ("event", "epoch", "rule")}
            self.fusions.setdefault(valid["rule"], {})[epoch] = facts
        elif kind == "snapshot":
            self.curves.setdefault(valid["rule"], {})[epoch] = valid["accuracy"]
            if "validation" in valid:
                self.validation.setdefault(valid["rule"], {})[epoch] = valid["validation"]
            if is_number(valid.get("elapsed")):
                self.elapsed[epoch] = valid["elapsed"]
