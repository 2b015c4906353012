"""What went wrong in a run: its folder read as rules want to see it, looked at once or while it trains, and from nearer by.

`diagnose` reads a folder, of a run that is finished, stopped or under way. `live` listens to a run's events. With `deep` every
upload's encoder sees the test images of the classes its client holds.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from oneround.data import Dataset, load_dataset
from oneround.errors import OneroundError, RunError
from oneround.folder import RunFolder
from oneround.learning import Emit
from oneround.learning.bank import unit_features
from oneround.models.prototype import filled
from oneround.observe.diagnosis import RULES, SEVERITIES, Entry, Finding, Run, findings
from oneround.observe.diagnosis.clients import OF_WEIGHT
from oneround.observe.diagnosis.geometry import Geometry, deep_findings, geometry_of
from oneround.observe.log import Event
from oneround.observe.sound import is_number
from oneround.protocol import blob
from oneround.protocol.model import preprocessing
from oneround.recipe import Recipe
from oneround.site import choose_device

log = logging.getLogger("oneround")


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at and what was found."""

    run: Run
    findings: tuple[Finding, ...]
    looked: tuple[str, ...]
    """Rules that had something to look at."""
    aside: Mapping[str, str]
    """Rules that had not, and why."""
    remarks: tuple[str, ...]
    """What of the folder could not be used."""
    geometry: Mapping[str, Geometry] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {
            "method": self.run.recipe.method,
            "epochs": self.run.epochs,
            "clients": {client: len(self.run.entries.get(client, ())) for client in self.run.clients},
            "findings": [finding.plain() for finding in self.findings],
            "looked": list(self.looked),
            "aside": dict(self.aside),
            "remarks": list(self.remarks),
            "geometry": {client: _finite(asdict(seen)) for client, seen in self.geometry.items()},
        }


def diagnose(folder: Path, *, deep: bool = False, data: Dataset | None = None) -> Diagnosis:
    """Look at a run's folder, whatever is in it so far; only a recipe must be there. `data`: for `deep`, if the recipe's is elsewhere."""
    place = RunFolder(folder)
    recipe = place.read_recipe()
    remarks: list[str] = []
    run = _read(place, recipe, remarks)
    found, geometry = findings(run), {}
    if deep:
        try:
            geometry = dict(_geometries(place, recipe, data or load_dataset(recipe.data, recipe.local.data_path)))
        except OneroundError as error:
            remarks.append(f"the deep check is left out: {error}")
        found += deep_findings(run, geometry)
    aside = {rule.name: rule.lacking(run) for rule in RULES if rule.lacking(run)}
    looked = tuple(rule.name for rule in RULES if rule.name not in aside)
    worst_first = sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(run, tuple(worst_first), looked, aside, tuple(remarks), geometry)


# --- a folder as rules see it ----------------------------------------------------------------------------------------


def _read(place: RunFolder, recipe: Recipe, remarks: list[str]) -> Run:
    """All that is there; what cannot be read is left out with a remark."""
    measured: dict[str, dict[int, Entry]] = {}
    curves: dict[str, dict[int, float]] = {}
    alone: dict[str, dict[int, float]] = {}
    held_back: dict[str, dict[int, float]] = {}
    stopped: dict[str, tuple[int, str]] = {}
    held: dict[str, list[int]] = {}
    for event in place.metrics:
        _file(event, measured, curves, alone, held_back)
    for client, manifest in _manifests(place, remarks):
        for entry in manifest["history"]:
            _file({**entry, "event": "epoch", "client": client}, measured, curves, alone, held_back)
        if manifest.get("stopped"):
            stopped[client] = (int(manifest["epoch"]), str(manifest["stopped"]))
        if manifest.get("class_counts"):  # under masks they are not told
            held[client] = manifest["class_counts"]
    setting = _setting(place, remarks)
    entries = {client: [seen[epoch] for epoch in sorted(seen)] for client, seen in sorted(measured.items())}
    return Run(
        recipe.federated, entries, stopped=stopped, curves=curves, alone=alone, validation=held_back,
        tested=_tested(place, remarks), **{"counts": held, **setting},
    )  # fmt: skip


def _manifests(place: RunFolder, remarks: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What clients wrote down since the last snapshot was logged: in their states, and in their uploads."""
    states = ((path, "state") for path in sorted(place.path.glob("clients/*/state.safetensors")))
    uploads = ((path, "upload") for path in sorted(place.path.glob("uploads/*.safetensors")))
    for path, kind in (*states, *uploads):
        try:
            manifest = blob.peek(path, kind)
        except OneroundError as error:
            if path.exists():  # a client that goes on training replaces them
                remarks.append(f"left out: {error}")
            continue
        history, epoch = manifest.get("history"), manifest.get("epoch")
        if isinstance(history, list) and all(isinstance(entry, dict) for entry in history) and isinstance(epoch, int):
            yield str(manifest.get("client")), manifest
        else:
            remarks.append(f"left out: {path} (no history in it)")


def _file(
    event: Event,
    measured: dict[str, dict[int, Entry]],
    curves: dict[str, dict[int, float]],
    alone: dict[str, dict[int, float]],
    held_back: dict[str, dict[int, float]],
) -> None:
    """Put one line of the log in its place; a line that lacks what it should have says nothing."""
    kind, epoch, client = event.get("event"), event.get("epoch"), event.get("client")
    if not isinstance(epoch, int):
        return
    if kind == "epoch" and isinstance(client, str):
        measured.setdefault(client, {})[epoch] = _checked(event)
    elif kind == "client" and isinstance(client, str) and is_number(event.get("accuracy")):
        alone.setdefault(client, {})[epoch] = event["accuracy"]
    elif kind == "snapshot" and isinstance(event.get("rule"), str) and is_number(event.get("accuracy")):
        curves.setdefault(event["rule"], {})[epoch] = event["accuracy"]
        if is_number(event.get("validation")):
            held_back.setdefault(event["rule"], {})[epoch] = event["validation"]


def _checked(entry: Mapping[str, Any]) -> Entry:
    """The numbers of an entry, its trouble, and its gradients if they have the form of a trace: it came from a client."""
    kept: dict[str, Any] = {name: value for name, value in entry.items() if is_number(value)}
    if isinstance(entry.get("trouble"), list):
        kept["trouble"] = [str(kind) for kind in entry["trouble"]]
    gradients = entry.get("gradients")
    if isinstance(gradients, dict) and all(_is_trace(there) for there in gradients.values()):
        kept["gradients"] = gradients
    return kept


def _is_trace(there: Any) -> bool:
    return isinstance(there, dict) and all(
        isinstance(there.get(name), dict) and all(value is None or is_number(value) for value in there[name].values())
        for name in ("norm", "cosine")
    )


def _setting(place: RunFolder, remarks: list[str]) -> dict[str, Any]:
    """What the clients were given: who holds what, the classes, and the size of a prototype."""
    told: dict[str, Any] = {}
    try:
        manifest = blob.peek(place.broadcast, "broadcast")
        told["class_names"] = tuple(map(str, manifest["class_names"]))
        if "weights.prototypes" in manifest["shapes"]:  # none where no network is trained
            told["features"] = int(manifest["shapes"]["weights.prototypes"][1])
    except (OneroundError, KeyError, TypeError, ValueError) as error:
        if place.broadcast.exists():
            remarks.append(f"left out: {error}")
    try:
        partition = place.read_partition(len(told.get("class_names", ())) or None)
        if partition:
            rows = partition["class_counts"]
            width = max(3, len(str(len(rows) - 1)))
            told["counts"] = {f"client_{number:0{width}d}": row for number, row in enumerate(rows) if sum(row)}
            told["shared"] = partition["shared_samples"]
    except OneroundError as error:
        remarks.append(f"left out: {error}")
    return told


def _tested(place: RunFolder, remarks: list[str]) -> list[int]:
    """Test images of each class, from any confusion matrix of the result."""
    if not place.result.is_file():
        return []
    try:
        scores = place.read_result()["rules"]
        return [sum(row) for row in next(iter(scores.values()))["confusion"]] if scores else []
    except (OneroundError, KeyError, TypeError, AttributeError) as error:
        remarks.append(f"left out: {place.result} ({error})")
        return []


# --- live ------------------------------------------------------------------------------------------------------------


def nobody(event: Event) -> None:
    """Where events go that nobody else wants."""


def live(folder: Path, tell: Callable[[Finding], None], emit: Emit = nobody) -> Emit:
    """An `emit` for `simulate.run(…, folder, emit=…)`: passes every event on to `emit`, and calls `tell` once per new finding.

    An event costs a look at one client's history; a snapshot costs a look at the log. What a resumed run had found before is not
    told again. May be called from several threads. If diagnosing itself fails, that is logged once and training goes on.
    """
    return _Watch(RunFolder(folder), tell, emit)


class _Watch:
    """The state of `live`: what the run measured so far, and what was told."""

    def __init__(self, place: RunFolder, tell: Callable[[Finding], None], emit: Emit) -> None:
        self.place, self.tell, self.emit = place, tell, emit
        self.lock = threading.Lock()
        self.entries: dict[str, list[Entry]] = {}
        self.curves: dict[str, dict[int, float]] = {}
        self.alone: dict[str, dict[int, float]] = {}
        self.validation: dict[str, dict[int, float]] = {}
        self.run: Run | None = None
        self.told: set[Any] = set()
        self.works = True

    def __call__(self, event: Event) -> None:
        self.emit(event)
        with self.lock:
            if not self.works:
                return
            try:
                self._take(event)
            except Exception as error:  # whatever it is, it must not end a training of days
                self.works = False
                log.warning(
                    "diagnosis while training ended: %r; afterwards: oneround diagnose %s", error, self.place.path
                )

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "plan":
            self._begin()
        elif kind == "epoch":
            client, epoch = event["client"], event["epoch"]
            seen = self.entries.setdefault(client, [])
            while seen and seen[-1]["epoch"] >= epoch:  # trained again after a kill
                seen.pop()
            seen.append(_checked(event))
            self._look([client], whole=self.run is None)
        elif kind == "snapshot":
            for (
                line
            ) in self.place.metrics:  # accuracies of clients alone and on validation data are logged but not emitted
                if line.get("event") in ("client", "snapshot"):
                    _file(line, {}, self.curves, self.alone, self.validation)
            self._look([], whole=True)

    def _begin(self) -> None:
        """What a resumed run knows already."""
        self.run = None
        self.told = set()
        self.entries, self.curves, self.alone, self.validation = {}, {}, {}, {}
        if self.place.recipe.is_file():
            before = _read(self.place, self.place.read_recipe(), [])
            self.entries = {client: list(seen) for client, seen in before.entries.items()}
            self.curves = {name: dict(curve) for name, curve in before.curves.items()}
            self.alone = {name: dict(curve) for name, curve in before.alone.items()}
            self.validation = {name: dict(curve) for name, curve in before.validation.items()}
            self.told = {finding.key for finding in findings(before)}

    def _look(self, clients: Iterable[str], *, whole: bool) -> None:
        """Let the rules look at these clients, and at the whole run."""
        if self.run is None:  # by the first epoch, the folder says what the clients were given
            recipe = self.place.read_recipe().federated
            self.run = Run(
                recipe, self.entries, curves=self.curves, alone=self.alone, validation=self.validation,
                **_setting(self.place, []),
            )  # fmt: skip
        for rule in RULES:
            if rule.at_run is None or (whole and not rule.lacking(self.run)):
                for finding in rule.look(self.run, clients):
                    if finding.key not in self.told:
                        self.told.add(finding.key)
                        self.tell(finding)


# --- from nearer by --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _geometries(place: RunFolder, recipe: Recipe, data: Dataset) -> Iterator[tuple[str, Geometry]]:
    """Every upload's encoder on the test images of its client's classes; a client of one class has no geometry."""
    uploads, device = place.uploads(), choose_device(recipe.local.device)
    broadcast, encoder = uploads.broadcast, uploads.broadcast.recipe.model.encoder
    if encoder is None:
        raise RunError("no network was trained, there is no encoder to look at")
    for upload in uploads:
        held = torch.nonzero(upload.class_counts >= OF_WEIGHT * upload.samples)[:, 0]
        test = data.test.take(torch.nonzero(torch.isin(data.test.labels, held))[:, 0])
        if len(torch.unique(test.labels)) > 1:
            net = filled(encoder, broadcast.shape[0], broadcast.classes, upload.weights).to(device)
            unit = unit_features(net, test.batches(device, *preprocessing(broadcast.recipe)))
            yield upload.client, geometry_of(unit.double().cpu(), test.labels)


def _finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}
