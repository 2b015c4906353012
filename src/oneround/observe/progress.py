"""What a person sees while a run works: its size first, then bars with the time left, then each snapshot's accuracy."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from oneround.observe.words import duration

LONG = 10  # seconds of scoring that are worth a line


class Live:
    """Turns events into a display; on a terminal bars, elsewhere plain lines."""

    def __init__(self, console: Console, *, every_snapshot: bool = True) -> None:
        self.console, self.every_snapshot = console, every_snapshot
        self.bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True,
        )  # fmt: skip
        self.current: TaskID | None = None
        self.central: TaskID | None = None
        self.partial: dict[str, int] = {}
        self.started: float | None = None
        self.first = 0.0
        self.told_time = self.told_scoring = False
        self.epochs = 1

    def __enter__(self) -> Live:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def emit(self, event: dict[str, Any]) -> None:
        """Take one event of a run."""
        kind = event["event"]
        if kind == "plan":
            self._announce(event)
        elif kind == "centralised":
            self.central = self.bars.add_task("all data together", total=event["steps"])
        elif kind in ("steps", "epoch"):
            self._advance(event)
        elif kind in ("trouble", "prepare"):
            self.say(f"  {self._name(event)}{event['text']}")
        elif kind == "scoring":
            self._now(event, "scoring")
        elif kind == "snapshot":
            self._now(event, "training")
            self._tell_scoring(event)
            if self.every_snapshot or event["epoch"] == self.epochs:
                best = sorted(event["accuracy"].items(), key=lambda item: -item[1])
                shown = ", ".join(f"{name} {100 * value:.1f}" for name, value in best)
                self.say(f"  {self._name(event)}{event['when']}: {shown}")
            if self.current is not None:
                total = self.bars.tasks[self.current].total or 0
                done = max(self.bars.tasks[self.current].completed, total * event["epoch"] / self.epochs)
                self.bars.update(self.current, completed=done)

    def _announce(self, event: dict[str, Any]) -> None:
        first = self.current is None
        for number, line in enumerate(event["lines"]):
            if first or number == 1 or line.lstrip().startswith("note:"):  # of a further partition, who holds what
                self.say(f"  {self._name(event)}{line.strip()}" if "partition" in event and number else line)
        self.epochs = event["epochs"]
        self.current = self.bars.add_task(f"{self._name(event)}training", total=event["steps"])
        self.started, self.told_time, self.told_scoring = None, False, False

    def _now(self, event: dict[str, Any], doing: str) -> None:
        """What the run is at, before its bar."""
        if self.current is not None:
            self.bars.update(self.current, description=f"{self._name(event)}{doing}")

    def _advance(self, event: dict[str, Any]) -> None:
        """Epochs count whole, steps of an epoch under way count as they come."""
        client = event["client"]
        task = self.central if client == "centralised" else self.current
        if task is None:
            return
        before = self.partial.get(client, 0)
        if event["event"] == "epoch":
            self.bars.advance(task, event["steps"] - before)
            self.partial[client] = 0
        else:
            self.bars.advance(task, event["done"] - before)
            self.partial[client] = event["done"]
        self._tell_time(task)

    def _tell_time(self, task: TaskID) -> None:
        """Once a few steps are done, say how long the run will take; needed where no bar is drawn."""
        bar = self.bars.tasks[task]
        if self.told_time or task != self.current or not bar.total:
            return
        if self.started is None:
            self.started, self.first = time.monotonic(), bar.completed  # what came before was starting up
            return
        elapsed, done = time.monotonic() - self.started, bar.completed - self.first
        if elapsed > 3 and done >= 5:
            self.told_time = True
            self.say(f"  about {duration(elapsed * (bar.total - bar.completed) / done)} left at this pace")

    def _tell_scoring(self, event: dict[str, Any]) -> None:
        """Where scoring takes long, say so once: the time left does not count it."""
        if not self.told_scoring and event["seconds"] > LONG and event["left"]:
            self.told_scoring = True
            told, more = duration(event["seconds"]), duration(event["seconds"] * event["left"])
            self.say(
                f"  fusing and scoring took {told} and comes {event['left']} more times: about {more} beside the training"
            )

    @staticmethod
    def _name(event: dict[str, Any]) -> str:
        return f"partition {event['partition']}: " if "partition" in event else ""


class SweepLive:
    """A whole grid in one display: cells done, what each worker is at, a line for every cell that ends."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=console, disable=not console.is_terminal, transient=True,
        )  # fmt: skip
        self.all: TaskID | None = None
        self.total = self.done = 0
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> SweepLive:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def emit(self, event: dict[str, Any]) -> None:
        """Take one event of the sweep, or of the run in one of its cells."""
        kind, cell = event["event"], event.get("cell", "")
        if kind == "sweep":
            self.total, self.done = event["cells"], event["done"]
            self.all = self.bars.add_task("cells", total=self.total, completed=self.done)
            self._say(f"{self.total} cells, {self.done} done already" if self.done else f"{self.total} cells")
        elif kind == "plan":
            self.tasks[cell] = self.bars.add_task(f"  {cell}", total=event["steps"])
        elif kind == "epoch" and cell in self.tasks:
            self.bars.advance(self.tasks[cell], event["steps"])
        elif kind == "trouble":
            self._say(f"{cell}: {event['text']}")
        elif kind == "cell":
            self._end(event)

    def _end(self, event: dict[str, Any]) -> None:
        if event["name"] in self.tasks:
            self.bars.remove_task(self.tasks.pop(event["name"]))
        if event["state"] == "stopped":
            return
        self.done += event["state"] == "done"
        if self.all is not None:
            self.bars.update(self.all, completed=self.done)
        best = sorted(event.get("accuracy", {}).items(), key=lambda item: -item[1])
        told = event.get("text") or ", ".join(f"{rule} {100 * value:.1f}" for rule, value in best[:3])
        self._say(f"[{self.done}/{self.total}] {event['name']}: {told}")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)
