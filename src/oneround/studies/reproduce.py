"""Runs the cells of a named study, one after another in this process, into one small record.

A cell's run folder is removed once the cell is in the record, which `oneround compare` and `oneround merge` read like any other record of
runs. Cells share the data and the kernels that the process has compiled; those that differ in how test images are scored share their
uploads. A study that was stopped goes on: finished cells are in the record, and the one under way in its run folder.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from oneround import acts
from oneround.config.load import change
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.errors import Interrupted, OneroundError, OutOfTime, RecipeError
from oneround.evaluate import score_uploads
from oneround.models.inference import TRANSDUCTIVE
from oneround.runs.archive import find_runs, keep
from oneround.runs.folder import RunFolder
from oneround.runs.log import Measurements
from oneround.runs.record import RunRecord, keys_of
from oneround.server.plan import DealtPlan
from oneround.simulate import run
from oneround.studies.named_study import Cell, keys_today
from oneround.studies.sweep import data_key, data_of
from oneround.training import Emit, silent

SCORING = "evaluation."
"""Keys that say how test images are scored: cells that differ in nothing else share their uploads, and those that do not differ a run."""
FIRST, EVERY = 11, 5
"""Epochs whose traces are kept: the first ones, then every so many, those of snapshots that are named, and the last."""
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
    for cell in progress.runs:  # one that was stopped after its cell had entered the record
        for left in (_run_folder(cell, folder).path, _first_folder(_run_folder(cell, folder))):
            shutil.rmtree(left, ignore_errors=True)
    emit({"event": "sweep", "cells": len(cells), "done": len(progress.runs)})
    together = trainings(progress.left)
    for recipe in reversed({data_key(training[0].recipe): training[0].recipe for training in together}.values()):
        data_of(recipe)  # one that is missing ends the study before anything trains
    for number, training in enumerate(together):
        if number and deadline is not None and time.time() >= deadline:
            break
        name, run_folder = training[0].name, _run_folder(training[0], folder)
        try:
            measured = measure(training, run_folder, deadline, partial(_named, emit, name))
        except OutOfTime:
            emit({"event": "cell", "name": name, "state": "stopped"})
            break
        except Interrupted:
            raise Interrupted("interrupted; what is done is kept, the same command goes on") from None
        except OneroundError as error:
            progress.failed |= dict.fromkeys(training, str(error))
            emit({"event": "cell", "name": name, "state": "failed", "text": str(error)})
            continue
        progress.runs |= measured
        _keep(progress, record)
        shutil.rmtree(run_folder.path)
        shutil.rmtree(_first_folder(run_folder), ignore_errors=True)
        for cell, found in measured.items():
            emit({"event": "cell", "name": cell.name, "state": "done", "accuracy": _main(found, cell.rule)})
    return progress


def _run_folder(cell: Cell, folder: str | PathLike[str]) -> RunFolder:
    """Another for every recipe, so that no cell goes on with the run of another."""
    return RunFolder(Path(folder) / cell.recipe.digest[:16])


def _first_folder(run_folder: RunFolder) -> Path:
    """Where the run before a cell lies."""
    return run_folder.path.with_name(f"{run_folder.path.name}-first")


def read_progress(
    cells: Sequence[Cell], record: str | PathLike[str], known: Sequence[str | PathLike[str]] = ()
) -> Progress:
    """The cells that the record has, or one of the known ones, and those that are left."""
    files = [path for path in (record, *known) if path != record or Path(path).exists()]
    runs = [(run, keys_today(run)) for run in (find_runs(files) if files else [])]
    found = {cell: next((run for run, keys in runs if cell.has_keys(keys)), None) for cell in cells}
    return Progress(cells, {cell: each for cell, each in found.items() if each is not None})


def trainings(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that share their uploads or their run, together, in the order of the first of each."""
    together: dict[str, list[Cell]] = {}
    for cell in cells:
        learned = {key: value for key, value in cell.keys.items() if not key.startswith(SCORING)}
        together.setdefault(json.dumps(learned, sort_keys=True), []).append(cell)
    return list(together.values())


def _keep(progress: Progress, record: Path) -> None:
    """Write the record; runs in it that are of no cell here stay."""
    ours: list[RunRecord] = []
    for cell in progress.cells:
        if cell in progress.runs and all(progress.runs[cell].keys != run.keys for run in ours):
            ours.append(progress.runs[cell])
    others = find_runs([record]) if record.exists() else []
    identities = [run.keys for run in ours]
    keep([*(run for run in others if run.keys not in identities), *ours], record)


def measure(
    training: Sequence[Cell], folder: RunFolder, deadline: float | None = None, emit: Emit = silent
) -> dict[Cell, RunRecord]:
    """Run the first of these cells, and score its uploads for the others. Raises OutOfTime at the deadline (`time.time()`)."""
    first, *others = training
    data, started = data_of(first.recipe), time.monotonic()
    seconds_file = folder.path / SECONDS
    before = folder.read_json(SECONDS, "remove it")["seconds"] if seconds_file.is_file() else 0.0
    try:
        recipe = first.recipe
        if first.first is not None:
            run(first.first, _first_folder(folder), data=data, resume=True, emit=emit, deadline=deadline, draws=False)
            recipe = change(recipe, {"local.initial_features": _first_folder(folder)})
        run(recipe, folder.path, data=data, resume=True, emit=emit, deadline=deadline, draws=False)
        measured = {first: _shortened(RunRecord.read(folder.path, strict=["result.json"]))}
        for cell in others:
            same = next((found for done, found in measured.items() if done.keys == cell.keys), None)
            measured[cell] = same or rescored(measured[first], folder, acts.resolve(cell.recipe, data), data)
    finally:
        seconds = before + time.monotonic() - started
        if folder.path.is_dir():
            folder.write_json(SECONDS, {"seconds": seconds})
    return {cell: replace(each, seconds=seconds) for cell, each in measured.items()}


def _named(emit: Emit, cell: str, event: dict[str, Any]) -> None:
    emit({**event, "cell": cell})


def rescored(measured: RunRecord, folder: RunFolder, recipe: Recipe, data: Dataset) -> RunRecord:
    """A run with the uploads of another, scored as its own recipe says after the last epoch; traces are with the other."""
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


def _main(run: RunRecord, rule: str | None) -> dict[str, float]:
    """Accuracy by the rule that counts, in both modes; None: the rule that makes the model."""
    rule = rule or run.main_rule
    own = {name.removeprefix(f"{rule}, "): value for name, value in run.accuracy.items()}
    return {name: value for name, value in own.items() if name == rule or name.startswith(TRANSDUCTIVE)}


def _shortened(run: RunRecord) -> RunRecord:
    """With the traces of some epochs only."""
    snapshots = run.recipe.snapshots
    named = snapshots if isinstance(snapshots, list) else []
    epochs = {
        client: {epoch: entry for epoch, entry in by_epoch.items() if _is_kept(epoch, [*named, max(by_epoch)])}
        for client, by_epoch in run.measurements.epochs.items()
    }
    return replace(run, measurements=replace(run.measurements, epochs=epochs))


def _is_kept(epoch: int, named: Sequence[int]) -> bool:
    return epoch <= FIRST or (epoch - 1) % EVERY == 0 or epoch in named
