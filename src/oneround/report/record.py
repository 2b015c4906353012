"""A run folder as a report sees it, finished or not: what was measured, without touching weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from oneround.errors import ProtocolError, RunError
from oneround.folder import RunFolder
from oneround.observe.log import Event
from oneround.observe.sound import is_number
from oneround.protocol import blob
from oneround.recipe import Recipe

CLIENTS = 8  # drawn one by one; of more, those with most samples
Trace = dict[str, dict[int, float | None]]
"""Client → epoch → value."""


@dataclass(frozen=True)
class Record:
    """Everything a run left to read."""

    folder: Path
    recipe: Recipe
    partition: Mapping[str, Any]
    class_names: tuple[str, ...]
    environment: Mapping[str, Any]
    result: Mapping[str, Any] | None
    """None while the run is not finished."""
    epochs: Mapping[str, Mapping[int, Event]]
    """Client → epoch → what training measured."""
    curves: Trace
    """Rule → epoch → accuracy in percent."""
    alone: Trace
    """Client → epoch → accuracy in percent."""
    stopped: tuple[str, ...]
    """Why clients ended before their time."""
    fusions: Mapping[str, dict[int, dict[str, Any]]]
    """Rule → round → what a rule that acts between rounds told."""

    @property
    def title(self) -> str:
        return f"{self.recipe.method} on {self.recipe.data.kind}"

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def reached(self) -> int:
        """The epoch every client has come to, as far as is known."""
        return min((max(done) for done in self.epochs.values()), default=0) if self.epochs else 0

    @property
    def rule(self) -> str:
        """The rule that makes the model."""
        return next(iter((self.result or {}).get("rules", self.curves)), self.recipe.fusion[0].label)

    def final(self) -> tuple[dict[str, float], dict[str, float]]:
        """Accuracy in percent of rules and of clients alone, from the result or, before there is one, from the last snapshot."""
        if self.result is None:
            return _last(self.curves), _last(self.alone)
        rules, clients = (
            {name: 100 * each["accuracy"] for name, each in self.result[key].items()} for key in ("rules", "clients")
        )
        return rules, clients

    @cached_property
    def counts(self) -> dict[str, list[int]]:
        """Samples of each class, by client."""
        rows = self.partition.get("class_counts", [])
        width = max(3, len(str(len(rows) - 1)))
        return {f"client_{number:0{width}d}": row for number, row in enumerate(rows)}

    @cached_property
    def clients(self) -> list[str]:
        """Those with data."""
        return [name for name, row in self.counts.items() if sum(row)] or sorted(self.epochs)

    def largest(self, most: int) -> list[str]:
        """The clients with most samples, in their order."""
        kept = sorted(self.clients, key=lambda name: -sum(self.counts.get(name, [])))[:most]
        return [name for name in self.clients if name in kept]

    def trace(self, key: str) -> Trace:
        """Something measured every epoch, by client; empty where it never was."""
        found: Trace = {}
        for client, epochs in self.epochs.items():
            values = {epoch: event[key] for epoch, event in epochs.items() if is_number(event.get(key))}
            if values:
                found[client] = values
        return found

    def cosines(self, place: str) -> dict[str, Trace]:
        """Pair of terms → client → epoch → cosine of their gradients at features or prototypes."""
        found: dict[str, Trace] = {}
        for client, epochs in self.epochs.items():
            for epoch, event in epochs.items():
                told = (event.get("gradients") or {}).get(place, {}).get("cosine", {})
                for pair, value in told.items():
                    if value is not None:
                        found.setdefault(pair, {}).setdefault(client, {})[epoch] = value
        return found


def _last(trace: Trace) -> dict[str, float]:
    ends = {name: values[max(values)] for name, values in trace.items()}
    return {name: value for name, value in ends.items() if value is not None}


def is_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file()


def find_folders(paths: Iterable[Path]) -> list[Path]:
    """Every run folder in these folders, begun or finished, however deep."""
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_file():
            raise RunError(
                f"{path}: a file; a report needs run folders (a record can be compared: oneround compare {path})"
            )
        if not path.exists():
            raise RunError(f"{path}: no such folder")
        for recipe in sorted(path.rglob("recipe.yaml")):
            found.setdefault(recipe.parent.resolve(), recipe.parent)
    if not found:
        raise RunError(f"no run in {', '.join(map(str, paths))} (a run folder has a recipe.yaml)")
    return list(found.values())


def read(folder: Path) -> Record:
    """What is in a run folder; what is not there yet is left empty."""
    place = RunFolder(folder)
    recipe = place.read_recipe()
    result = place.read_result() if place.result.is_file() else None
    epochs: dict[str, dict[int, Event]] = {}
    curves: Trace = {}
    alone: Trace = {}
    stopped: list[str] = []
    fusions: dict[str, dict[int, dict[str, Any]]] = {}
    for manifest in _uploads(place) if result is None else ():  # ahead of the log, which is written at snapshots
        stopped += [str(manifest["stopped"])] if manifest.get("stopped") else []
        for entry in manifest.get("history", []):
            epochs.setdefault(str(manifest["client"]), {})[entry["epoch"]] = entry
    for event in place.metrics:
        if event.get("event") == "epoch":
            epochs.setdefault(event["client"], {})[event["epoch"]] = event
        elif event.get("event") == "snapshot":
            curves.setdefault(event["rule"], {})[event["epoch"]] = 100 * event["accuracy"]
        elif event.get("event") == "client":
            alone.setdefault(event["client"], {})[event["epoch"]] = 100 * event["accuracy"]
        elif event.get("event") == "fusion":
            told = {key: value for key, value in event.items() if key not in ("event", "epoch", "rule")}
            fusions.setdefault(event["rule"], {})[event["epoch"] // recipe.training.epochs] = told
    names = _class_names(place)
    partition = place.read_partition(len(names) or None)
    names = names or tuple(map(str, range(len(partition.get("class_counts", [[]])[0]))))
    return Record(
        folder, recipe, partition, names, place.read_environment(), result,
        {client: epochs[client] for client in sorted(epochs)}, curves, alone, tuple(stopped), fusions,
    )  # fmt: skip


def _uploads(place: RunFolder) -> Iterator[blob.Manifest]:
    """What the uploads that are there say of themselves; a damaged one says nothing."""
    for path in sorted((place.path / "uploads").glob("*.safetensors")):
        try:
            yield blob.peek(path, "upload")
        except ProtocolError:
            continue


def _class_names(place: RunFolder) -> tuple[str, ...]:
    """As the broadcast names them."""
    try:
        return tuple(map(str, blob.peek(place.broadcast, "broadcast")["class_names"]))
    except (ProtocolError, KeyError, TypeError):
        return ()
