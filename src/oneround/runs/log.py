"""The metrics log, one JSON object (an event) per line, and its parser."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneround.files import write_durably

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
        """Write events at once and flush them to the disk: a kill leaves all of them, or a torn last line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_lines(events))
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Event]:
        """Every valid event; damaged lines are skipped, such as the last one of a killed run."""
        if not self.path.is_file():
            return
        for line in self.path.read_bytes().splitlines():
            with suppress(ValueError):
                if (event := valid_event(json.loads(line))) is not None:
                    yield event

    def replace(self, events: Iterable[Event]) -> None:
        """Replace the log by these events."""
        write_durably(self.path, _lines(events).encode())


def _lines(events: Iterable[Event]) -> str:
    return "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events)


@dataclass
class Measurements:
    """The metrics of a run so far. Accuracies are shares from 0 to 1."""

    epochs: dict[str, dict[int, EpochMetrics]] = field(default_factory=dict)
    """Client → epoch → metrics of its training."""
    curves: Curves = field(default_factory=dict)
    """Rule → epoch → test accuracy of the fused model."""
    validation: Curves = field(default_factory=dict)
    """Rule → epoch → accuracy on the validation images; empty where there are none."""
    local_accuracy: Curves = field(default_factory=dict)
    """Client → epoch → test accuracy of its own model."""
    fusions: dict[str, dict[int, Event]] = field(default_factory=dict)
    """Rule → epoch → metrics of a rule that works between rounds, such as MergeNet."""
    elapsed: dict[int, float] = field(default_factory=dict)
    """Epoch → seconds since the start, at its snapshot."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Measurements:
        """Parse events; a later event replaces an earlier one of the same kind, name and epoch. Clients and their epochs are sorted.

        >>> Measurements.of([{"event": "snapshot", "epoch": 3, "rule": "iffi", "accuracy": 0.5}]).curves
        {'iffi': {3: 0.5}}
        """
        measured = cls()
        for event in events:
            measured.add(event)
        measured.epochs = {client: dict(sorted(by.items())) for client, by in sorted(measured.epochs.items())}
        return measured

    def add(self, event: Event) -> None:
        """Add one event: a line of the log, or the snapshot of a run under way, whose lines of the log are its `logged`.

        An event without the keys of its kind is ignored.
        """
        for line in event.get("logged", ()):
            self.add(line)
        valid = valid_event(event)
        if valid is None:
            return
        kind, epoch = valid["event"], valid["epoch"]
        if kind == "epoch":
            self.epochs.setdefault(valid["client"], {})[epoch] = epoch_metrics(valid)
        elif kind == "client":
            self.local_accuracy.setdefault(valid["client"], {})[epoch] = valid["accuracy"]
        elif kind == "fusion":
            metrics = {name: value for name, value in valid.items() if name not in ("event", "epoch", "rule")}
            self.fusions.setdefault(valid["rule"], {})[epoch] = metrics
        elif kind == "snapshot":
            self.curves.setdefault(valid["rule"], {})[epoch] = valid["accuracy"]
            if "validation" in valid:
                self.validation.setdefault(valid["rule"], {})[epoch] = valid["validation"]
            if is_number(valid.get("elapsed")):
                self.elapsed[epoch] = valid["elapsed"]


# --- checks of events ------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_share(value: Any) -> bool:
    """A finite number from 0 to 1."""
    return is_number(value) and 0 <= value <= 1


def valid_event(event: Any) -> Event | None:
    """An event that has the keys of its kind, without damaged gradients or validation accuracy; None for any other."""
    if not isinstance(event, dict) or not isinstance(event.get("epoch"), int):
        return None
    kind = event.get("event")
    owner = "rule" if kind in ("snapshot", "fusion") else "client"
    if not isinstance(kind, str) or not isinstance(event.get(owner), str):
        return None
    if kind in ("client", "snapshot") and not is_share(event.get("accuracy")):
        return None
    damaged = set()
    if not _are_gradients(event.get("gradients", {})):
        damaged.add("gradients")
    if not is_share(event.get("validation", 0)):
        damaged.add("validation")
    return {name: value for name, value in event.items() if name not in damaged} if damaged else event


def epoch_metrics(event: Event) -> EpochMetrics:
    """The numbers, kinds of trouble and gradients of a valid event."""
    metrics: Event = {name: value for name, value in event.items() if is_number(value)}
    if isinstance(event.get("trouble"), list):
        metrics["trouble"] = [str(kind) for kind in event["trouble"]]
    if "gradients" in event:
        metrics["gradients"] = event["gradients"]
    return metrics


def _are_gradients(traced: Any) -> bool:
    """Whether these are norms and cosines of gradients, by the tensor they were traced at."""
    return isinstance(traced, dict) and all(
        isinstance(measured, dict)
        and isinstance(measured.get(name), dict)
        and all(value is None or is_number(value) for value in measured[name].values())
        for measured in traced.values()
        for name in ("norm", "cosine")
    )
