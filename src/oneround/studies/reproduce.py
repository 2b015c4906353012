"""Runs the cells of a named study, one after another in this process, into one small record.

A cell's run folder is removed once the cell is in the record, which `oneround compare` and `oneround merge` read like any other record of
runs. Cells share the data and one worker, and those that differ in how test images are scored share their uploads. A study
that was stopped goes on: finished cells are in the record, and the one under way in its run folder.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from oneround import acts
from oneround.config.recipe import Recipe
from oneround.data import Dataset, load_dataset
from oneround.errors import Interrupted, OneroundError, OutOfTime, RecipeError
from oneround.evaluate import TRANSDUCTIVE, score_uploads
from oneround.runs.archive import find_runs, keep
from oneround.runs.folder import RunFolder
from oneround.runs.log import Measurements
from oneround.runs.record import RunRecord, keys_of
from oneround.server.plan import DealtPlan
from oneround.simulate import run
from oneround.simulate.workers import WorkerPool
from oneround.site import choose_device
from oneround.studies.named_study import Cell
from oneround.training import Emit, silent

log = logging.getLogger("oneround")

SCORING = "evaluation."
"""Keys that say how test images are scored: cells that differ in nothing else share their uploads."""
FIRST, EVERY = 11, 5
"""Epochs whose traces are kept: the first ones, then every so many, and the last."""
SECONDS = "seconds.json"


@dataclass
class Progress:
    """The cells of a study, and how far they are."""

    cells: Sequence[Cell]
    runs: dict[Cell, RunRecord]
    """Of those that are measured."""
    failed: dict[Cell, str] = field(default_factory=dict)
    """Cell → error message."""

    @property
    def left(self) -> list[Cell]:
        """Cells that are not measured, without those that failed."""
        return [cell for cell in self.cells if cell not in self.runs and cell not in self.failed]


def reproduce(
    cells: Sequence[Cell],
    record: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    known: Sequence[str | PathLike[str]] = (),
    minutes: float | None = None,
    emit: Emit = silent,
) -> Progress:
    """Measure the cells that are not in the record, and add them to it; run folders are below `folder` meanwhile.

    `known`: other records, whose runs are taken over where they are those of a cell. `minutes`: stop between two epochs after so long,
    not before the first. A cell that fails is reported, and the others go on.
    """
    if minutes is not None and not minutes > 0:
        raise RecipeError(f"--minutes {minutes}: must be a number above 0")
    record, deadline = Path(record), time.time() + 60 * minutes if minutes else None
    progress = read_progress(cells, record, known)
    if progress.runs and known:
        _keep(progress, record)
    emit({"event": "sweep", "cells": len(cells), "done": len(progress.runs)})
    with Measuring(Path(folder), deadline, emit) as measuring:
        together = trainings(progress.left)
        for recipe in reversed({_data_of(training[0].recipe): training[0].recipe for training in together}.values()):
            measuring.data(recipe)  # one that is missing ends the study before anything trains
        for number, training in enumerate(together):
            if number and deadline is not None and time.time() >= deadline:
                break
            name = training[0].name
            try:
                measured = measuring.measure(training)
            except OutOfTime:
                emit({"event": "cell", "name": name, "state": "stopped"})
                break
            except Interrupted:
                raise Interrupted("interrupted; what is done is kept, the same command goes on") from None
            except OneroundError as error:
                progress.failed |= dict.fromkeys(training, str(error))
                emit({"event": "cell", "name": name, "state": "failed", "text": str(error)})
                measuring.start_afresh(error)
                continue
            progress.runs |= measured
            _keep(progress, record)
            measuring.remove(training)
            for cell, found in measured.items():
                emit({"event": "cell", "name": cell.name, "state": "done", "accuracy": _main(found)})
    return progress


def read_progress(
    cells: Sequence[Cell], record: str | PathLike[str], known: Sequence[str | PathLike[str]] = ()
) -> Progress:
    """The cells that the record has, or one of the known ones, and those that are left."""
    files = [path for path in (record, *known) if path != record or Path(path).exists()]
    runs = find_runs(files) if files else []
    found = {cell: next((each for each in runs if cell.is_of(each)), None) for cell in cells}
    return Progress(cells, {cell: each for cell, each in found.items() if each is not None})


def trainings(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that share their uploads, together, in the order of the first of each."""
    together: dict[str, list[Cell]] = {}
    for cell in cells:
        learned = {key: value for key, value in cell.keys.items() if not key.startswith(SCORING)}
        together.setdefault(json.dumps(learned, sort_keys=True), []).append(cell)
    return list(together.values())


def _data_of(recipe: Recipe) -> str:
    """The same for recipes with the same data set."""
    return json.dumps([recipe.data.dump(), str(recipe.local.data_path)])


def _keep(progress: Progress, record: Path) -> None:
    """Write the record; runs in it that are of no cell here stay."""
    ours = [progress.runs[cell] for cell in progress.cells if cell in progress.runs]
    others = find_runs([record]) if record.exists() else []
    identities = [run.keys for run in ours]
    keep([*(run for run in others if run.keys not in identities), *ours], record)


class Measuring:
    """What cells share: the data set, and on one device the worker with its copy of the images."""

    def __init__(self, folder: Path, deadline: float | None, emit: Emit) -> None:
        self.folder, self.deadline, self.emit = folder, deadline, emit
        self._data: tuple[str, Dataset] | None = None
        self._stack = ExitStack()
        self._pool: WorkerPool | None = None
        self._cell = ""

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def measure(self, training: Sequence[Cell]) -> dict[Cell, RunRecord]:
        """Run the first of these cells and score its uploads for the others. Raises OutOfTime at the deadline."""
        first, started = training[0], time.monotonic()
        data, folder = self.data(first.recipe), self.run_folder(training)
        self._cell = first.name
        seconds = self._seconds_before(folder)
        try:
            pool = self._workers(first.recipe, data)
            run(
                first.recipe, folder.path, data=data, resume=True, emit=self._emit, workers=pool, deadline=self.deadline
            )
            measured = {first: _shortened(RunRecord.read(folder.path, strict=["result.json"]))}
            for cell in training[1:]:
                measured[cell] = rescored(measured[first], folder, acts.resolve(cell.recipe, data), data)
        finally:
            seconds += time.monotonic() - started
            if folder.path.is_dir():
                folder.write_json(SECONDS, {"seconds": seconds})
        return {cell: replace(each, seconds=seconds) for cell, each in measured.items()}

    def data(self, recipe: Recipe) -> Dataset:
        """The data set of a recipe; the last one is kept."""
        key = _data_of(recipe)
        if self._data is None or self._data[0] != key:
            self.start_afresh()
            self._data = key, load_dataset(recipe.data, recipe.local.data_path)
        return self._data[1]

    def run_folder(self, training: Sequence[Cell]) -> RunFolder:
        return RunFolder(self.folder / training[0].recipe.digest[:16])

    def remove(self, training: Sequence[Cell]) -> None:
        """Remove the run folder with all weights in it."""
        shutil.rmtree(self.run_folder(training).path)

    def start_afresh(self, error: BaseException | None = None) -> None:
        """End the worker, at once after an error; the next cell has a new one."""
        self._pool = None
        self._stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _workers(self, recipe: Recipe, data: Dataset) -> WorkerPool | None:
        """The worker that cells share, where one trains all clients on the labels as they are; else the run makes its own."""
        local = recipe.local
        if (choose_device(local.device).type == "cpu" and local.workers != 1) or recipe.label_noise is not None:
            return None
        if self._pool is None:
            self._pool = self._stack.enter_context(WorkerPool(data.train, 1, self._emit, self.deadline))
        return self._pool

    def _emit(self, event: dict[str, Any]) -> None:
        self.emit({**event, "cell": self._cell})

    @staticmethod
    def _seconds_before(folder: RunFolder) -> float:
        """Seconds that the cell took before it was stopped."""
        if not (folder.path / SECONDS).is_file():
            return 0.0
        return float(folder.read_json(SECONDS, "remove it")["seconds"])


def rescored(measured: RunRecord, folder: RunFolder, recipe: Recipe, data: Dataset) -> RunRecord:
    """The record of a run whose uploads are those of another, scored as its own recipe says after the last epoch; traces are in that of the other."""
    broadcast = replace(folder.uploads().broadcast, recipe=recipe.federated)
    uploads, site = folder.uploads(), DealtPlan.of(recipe, data).server(folder.path)
    rules = {rule.label: rule for rule in acts.rules_of(recipe)}
    batch = recipe.evaluation.transductive
    with site.arithmetic(broadcast.parameters):
        scores = score_uploads(rules, uploads, broadcast, data.test, site, validation=site.validation, batch=batch)
    last = recipe.epochs
    measurements = Measurements(
        curves={name: {last: score.accuracy} for name, score in scores.rules.items()},
        validation={name: {last: score.accuracy} for name, score in scores.validation.items()},
        local_accuracy={name: {last: score.accuracy} for name, score in scores.clients.items()},
    )
    result = {
        **(measured.result or {}),
        "rules": {name: score.plain() for name, score in scores.rules.items()},
        "clients": {name: score.plain() for name, score in scores.clients.items()},
        "personalised": {},
    }
    keys = keys_of(recipe.plain())
    return replace(measured, keys=keys, whole_recipe=recipe, measurements=measurements, result=result)


def _main(run: RunRecord) -> dict[str, float]:
    """Accuracy by the rule that makes the model, in both modes."""
    own = {name.removeprefix(f"{run.main_rule}, "): value for name, value in run.accuracy.items()}
    return {name: value for name, value in own.items() if name == run.main_rule or name.startswith(TRANSDUCTIVE)}


def _shortened(run: RunRecord) -> RunRecord:
    """With the traces of some epochs only."""
    epochs = {
        client: {epoch: entry for epoch, entry in by_epoch.items() if _is_kept(epoch, max(by_epoch))}
        for client, by_epoch in run.measurements.epochs.items()
    }
    return replace(run, measurements=replace(run.measurements, epochs=epochs))


def _is_kept(epoch: int, last: int) -> bool:
    return epoch <= FIRST or (epoch - 1) % EVERY == 0 or epoch == last
