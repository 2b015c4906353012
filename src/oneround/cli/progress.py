"""Progress display of a run: its size first, then bars with the time left, then each snapshot's accuracy."""

from __future__ import annotations

import time
from typing import Any, Self

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

from oneround.cli.options import print_line
from oneround.formatting import duration

LONG = 10  # seconds of scoring that are reported


class _Display:
    """Bars on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, *units: TextColumn) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            *units,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def print_line(self, text: str) -> None:
        print_line(text, self.console, wrap=True)


class Live(_Display):
    """The display of a run or a study."""

    def __init__(self, console: Console, *, every_snapshot: bool = True) -> None:
        super().__init__(console, TextColumn("steps"))
        self.every_snapshot = every_snapshot
        self.current: TaskID | None = None
        self.central: TaskID | None = None
        self.partial: dict[str, int] = {}
        self.started: float | None = None
        self.first = 0.0
        self.time_printed = self.scoring_printed = False
        self.epochs = 1

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
            self.print_line(f"  {self._name(event)}{event['text']}")
        elif kind == "scoring":
            self._describe(event, "scoring")
        elif kind == "fusing":
            self._describe(event, f"{event['rule'].split()[0]}, {event['text']}: {event['done']:,} of {event['of']:,}")
        elif kind == "snapshot":
            self._describe(event, "training")
            self._print_scoring_time(event)
            if self.every_snapshot or event["epoch"] == self.epochs:
                best = sorted(event["accuracy"].items(), key=lambda item: -item[1])
                scores = ", ".join(f"{name} {100 * value:.1f}" for name, value in best)
                self.print_line(f"  {self._name(event)}{event['when']}: {scores}")
            if self.current is not None:
                total = self.bars.tasks[self.current].total or 0
                done = max(self.bars.tasks[self.current].completed, total * event["epoch"] / self.epochs)
                self.bars.update(self.current, completed=done)

    def _announce(self, event: dict[str, Any]) -> None:
        first = self.current is None
        for number, line in enumerate(event["lines"]):
            if first or number == 1 or line.lstrip().startswith("note:"):  # of a further partition, who holds what
                self.print_line(f"  {self._name(event)}{line.strip()}" if "partition" in event and number else line)
        self.epochs = event["epochs"]
        self.current = self.bars.add_task(f"{self._name(event)}training", total=event["steps"])
        self.started, self.time_printed, self.scoring_printed = None, False, False

    def _describe(self, event: dict[str, Any], activity: str) -> None:
        """Show in front of the bar what the run is doing."""
        if self.current is not None:
            self.bars.update(self.current, description=f"{self._name(event)}{activity}")

    def _advance(self, event: dict[str, Any]) -> None:
        """Advance the bar by an event's steps, less those of the same epoch that were counted before."""
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
        self._print_time_left(task)

    def _print_time_left(self, task: TaskID) -> None:
        """Print once, after a few steps, how long the run will take: outside a terminal there is no bar to show it."""
        bar = self.bars.tasks[task]
        if self.time_printed or task != self.current or not bar.total:
            return
        if self.started is None:
            self.started, self.first = time.monotonic(), bar.completed  # what came before was starting up
            return
        elapsed, done = time.monotonic() - self.started, bar.completed - self.first
        if elapsed > 3 and done >= 5:
            self.time_printed = True
            self.print_line(f"  about {duration(elapsed * (bar.total - bar.completed) / done)} left at this pace")

    def _print_scoring_time(self, event: dict[str, Any]) -> None:
        """Print once how long scoring takes, if that is long: the time left does not include it."""
        if not self.scoring_printed and event["seconds"] > LONG and event["left"]:
            self.scoring_printed = True
            took, more = duration(event["seconds"]), duration(event["seconds"] * event["left"])
            self.print_line(
                f"  fusing and scoring took {took} and is due {event['left']} more times: about {more} in addition to training"
            )

    @staticmethod
    def _name(event: dict[str, Any]) -> str:
        return f"partition {event['partition']}: " if "partition" in event else ""


class SweepLive(_Display):
    """The display of a sweep: cells done, a bar for every cell that is running, a line for every cell that ends."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.cells: TaskID | None = None
        self.total = self.done = 0
        self.tasks: dict[str, TaskID] = {}

    def emit(self, event: dict[str, Any]) -> None:
        """Take one event of the sweep, or of the run in one of its cells."""
        kind, cell = event["event"], event.get("cell", "")
        if kind == "sweep":
            self.total, self.done = event["cells"], event["done"]
            self.cells = self.bars.add_task("cells", total=self.total, completed=self.done)
            self.print_line(f"{self.total} cells, {self.done} done already" if self.done else f"{self.total} cells")
        elif kind == "plan":
            self.tasks[cell] = self.bars.add_task(f"  {cell}", total=event["steps"])
        elif kind == "epoch" and cell in self.tasks:
            self.bars.advance(self.tasks[cell], event["steps"])
        elif kind == "trouble":
            self.print_line(f"{cell}: {event['text']}")
        elif kind == "cell":
            self._end(event)

    def _end(self, event: dict[str, Any]) -> None:
        if event["name"] in self.tasks:
            self.bars.remove_task(self.tasks.pop(event["name"]))
        if event["state"] == "stopped":
            return
        self.done += event["state"] == "done"
        if self.cells is not None:
            self.bars.update(self.cells, completed=self.done)
        best = sorted(event.get("accuracy", {}).items(), key=lambda item: -item[1])
        text = event.get("text") or ", ".join(f"{rule} {100 * value:.1f}" for rule, value in best[:3])
        self.print_line(f"[{self.done}/{self.total}] {event['name']}: {text}")
