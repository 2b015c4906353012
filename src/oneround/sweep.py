"""A grid of runs: methods × α × partitions × seeds × any recipe key; every cell is a run folder.

What is done is skipped, what was begun is resumed, so a sweep can be stopped at any moment (or by its own time budget, between
epochs) and started again. Cells run side by side on the machine's cores or GPUs, or as tasks of a Ray cluster.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, field_validator

from oneround.acts import settle
from oneround.crew import Listener, begin_worker, forked_from, hidden_main
from oneround.data import Dataset, load_dataset
from oneround.errors import OneroundError, OutOfTime, RecipeError, RunError
from oneround.finished import flat
from oneround.folder import RunFolder
from oneround.learning import Emit, silent
from oneround.parts import Strict
from oneround.reading import change, checked, load, read_yaml
from oneround.recipe import Recipe
from oneround.sections import Seed
from oneround.simulate import run

MOST = 1000  # seeds in a range


class Grid(Strict):
    """What to run."""

    methods: list[str] = Field(min_length=1)
    """Presets by name or alias, or recipe files."""
    alpha: list[Annotated[float, Field(gt=0)]] = Field(default=[])
    """Values of partition.alpha; left out: each recipe's own."""
    partitions: list[Seed] = Field(default=[1], min_length=1)
    """Partition seeds: a list, or `1-5`."""
    seeds: list[Seed] = Field(default=[1], min_length=1)
    """Initialisation and training seeds: repeats on the same partition."""
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default={})
    """Recipe keys with the values to try: `alignment.weight.value: [1, 5, 10]`."""
    set: dict[str, Any] = Field(default={})
    """Recipe keys that are the same in every cell."""

    @field_validator("partitions", "seeds", mode="before")
    @classmethod
    def _range(cls, value: Any) -> Any:
        match = re.fullmatch(r"(\d+)-(\d+)", value) if isinstance(value, str) else None
        if match is None:
            return value
        first, last = int(match[1]), int(match[2])
        if not first <= last < first + MOST:
            raise ValueError(f"{value} is no range of 1 to {MOST:,} seeds; give the first and the last, 1-5")
        return list(range(first, last + 1))

    @field_validator("methods", "partitions", "seeds", "alpha")
    @classmethod
    def _once(cls, value: list[Any]) -> list[Any]:
        if len(set(value)) < len(value):
            raise ValueError("names something twice")
        return value

    @field_validator("grid")
    @classmethod
    def _each_once(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in value.items():
            twice = next((each for each in values if values.count(each) > 1), None)
            if twice is not None:
                raise ValueError(f"{key} names {twice} twice")
        return value


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    name: str
    """Its folder within the sweep's."""
    recipe: Recipe


def read_grid(path: Path) -> dict[str, Any]:
    """The YAML of a sweep, checked, to be completed by the command line."""
    raw = read_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a sweep is a YAML mapping (methods: [...], partitions: 1-5, …)")
    with _told_of(path):
        checked(Grid, raw)
    return raw


@contextmanager
def _told_of(name: str | Path) -> Iterator[None]:
    """Say in which file or preset a mistake is, line by line."""
    try:
        yield
    except RecipeError as error:
        lines = [line if str(name) in line else f"{name}: {line}" for line in str(error).splitlines()]
        raise RecipeError("\n".join(lines)) from None


def cells(grid: Grid, local: Iterable[tuple[str, Any]] = ()) -> list[Cell]:
    """Every combination, methods varying fastest: after each partition all methods can be compared."""
    varied: dict[str, list[Any]] = {**({"partition.alpha": grid.alpha} if grid.alpha else {}), **grid.grid}
    combinations = list(itertools.product(*([(key, value) for value in values] for key, values in varied.items())))
    found: dict[str, Cell] = {}
    methods: dict[str, str] = {}
    for partition, seed, changed, method in itertools.product(grid.partitions, grid.seeds, combinations, grid.methods):
        seeds = [("seeds.partition", partition), ("seeds.initialisation", seed), ("seeds.training", seed)]
        with _told_of(method):
            recipe = load(method, [*grid.set.items(), *changed, *seeds, *local])
        words = [Path(method).stem, *(f"{key.split('.')[-1]}={_word(value)}" for key, value in changed)]
        place = f"partition_{partition}" + (f"_seed_{seed}" if len(grid.seeds) > 1 else "")
        name = f"{'_'.join(words)}/{place}"
        if name in found:
            raise RecipeError(f"{methods[name]} and {method}: both would be kept in {name}; give one file another name")
        found[name], methods[name] = Cell(name, recipe), method
    return list(found.values())


def _word(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "-", str(value))


@dataclass(frozen=True)
class Progress:
    """How a sweep stands."""

    done: tuple[str, ...]
    failed: Mapping[str, str]
    left: tuple[str, ...]


def sweep(
    every: Sequence[Cell],
    folder: Path,
    *,
    minutes: float | None = None,
    workers: int | None = None,
    ray: str | None = None,
    emit: Emit = silent,
) -> Progress:
    """Run what is not done yet. Raises nothing for a cell that fails: it is told, and the others go on."""
    if minutes is not None and not minutes > 0:
        raise RecipeError(f"--minutes {minutes}: must be a number above 0")
    deadline = time.time() + 60 * minutes if minutes else None
    waiting = [cell for cell in every if not RunFolder(folder / cell.name).result.exists()]
    emit({"event": "sweep", "cells": len(every), "done": len(every) - len(waiting)})
    failed: dict[str, str] = {}
    for cell in every:  # before anything trains: a mistake in the last cell should not show after an hour
        _check(cell, folder)
    _kept.clear()
    with _on_ray(ray) if ray else _here(workers, waiting, emit) as (submit, width):
        queue = iter(waiting)
        running: dict[Future[dict[str, float]], str] = {}
        while True:
            in_time = deadline is None or time.time() < deadline
            for cell in itertools.islice(queue, width - len(running) if in_time else 0):
                running[submit(cell, folder, deadline)] = cell.name
            if not running:
                break
            for task in wait(running, return_when=FIRST_COMPLETED).done:
                _settle(task, running.pop(task), failed, emit)
    done = tuple(cell.name for cell in every if RunFolder(folder / cell.name).result.exists())
    left = tuple(cell.name for cell in every if cell.name not in done and cell.name not in failed)
    return Progress(done, failed, left)


def _check(cell: Cell, folder: Path) -> None:
    """What is in a cell's folder, done or begun, must be what is asked for now."""
    place = RunFolder(folder / cell.name)
    if not place.recipe.exists():
        return
    there, asked = place.read_recipe(), settle(cell.recipe, _data(cell.recipe))
    if there.digest != asked.digest:
        old, new = dict(flat(there.plain())), dict(flat(asked.plain()))
        key = next(key for key in [*new, *old] if old.get(key) != new.get(key))
        raise RecipeError(
            f"{place.path}: holds a run with {key} = {old.get(key)}, not {new.get(key)}; choose another --out"
        )


def _settle(task: Future[dict[str, float]], name: str, failed: dict[str, str], emit: Emit) -> None:
    """Take a finished cell's outcome."""
    try:
        accuracy = task.result()
    except OutOfTime:
        emit({"event": "cell", "name": name, "state": "stopped"})
    except OneroundError as error:
        failed[name] = str(error)
        emit({"event": "cell", "name": name, "state": "failed", "text": str(error)})
    except BrokenProcessPool:
        raise RunError(
            "a worker of the sweep died (out of memory?); the same command goes on where it was, perhaps with fewer --workers"
        ) from None
    else:
        emit({"event": "cell", "name": name, "state": "done", "accuracy": accuracy})


def work(cell: Cell, folder: Path, deadline: float | None, emit: Emit = silent) -> dict[str, float]:
    """One cell, in whatever process; the accuracy of every rule."""
    result = run(cell.recipe, folder / cell.name, data=_data(cell.recipe), resume=True, emit=emit, deadline=deadline)
    return dict(result.rules)


_kept: dict[tuple[str, Path | None], Dataset] = {}


def _data(recipe: Recipe) -> Dataset:
    """Read once per process; one data set at a time."""
    key = json.dumps(recipe.data.dump(), sort_keys=True), recipe.local.data_path
    if key not in _kept:
        _kept.clear()
        _kept[key] = load_dataset(recipe.data, recipe.local.data_path)
    return _kept[key]


# --- where cells run -------------------------------------------------------------------------------------------------

Submit = Callable[[Cell, Path, float | None], "Future[dict[str, float]]"]


@contextmanager
def _here(workers: int | None, waiting: Sequence[Cell], emit: Emit) -> Iterator[tuple[Submit, int]]:
    """Processes on this machine: one per GPU, or one per core each training with one thread."""
    gpus = torch.cuda.device_count() if any(cell.recipe.local.device == "auto" for cell in waiting) else 0
    width = max(1, min(workers or gpus or os.cpu_count() or 1, len(waiting)))
    processes = forked_from(__name__)
    listener, devices = Listener(processes, emit), processes.SimpleQueue()
    for number in range(width):
        devices.put(f"cuda:{number % gpus}" if gpus else None)
    pool = ProcessPoolExecutor(width, processes, initializer=_begin, initargs=(listener.events, devices))
    try:
        with hidden_main():
            yield lambda cell, folder, deadline: pool.submit(_work_here, cell, folder, deadline), width
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        listener.close()


_device: str | None = None
_emit: Emit = silent


def _begin(events: Any, devices: Any) -> None:
    """First thing in a worker process."""
    global _device, _emit
    begin_worker()
    _device, _emit = devices.get(), events.put


def _work_here(cell: Cell, folder: Path, deadline: float | None) -> dict[str, float]:
    own = {"local.device": _device} if _device is not None and cell.recipe.local.device == "auto" else {}
    return work(_in_turn(cell, own), folder, deadline, partial(_tag, cell.name))


def _in_turn(cell: Cell, changes: Mapping[str, Any]) -> Cell:
    """The cell with its clients one after another: the other cores have cells of their own."""
    return replace(cell, recipe=change(cell.recipe, {"local.workers": 1, **changes}))


def _tag(name: str, event: dict[str, Any]) -> None:
    _emit({**event, "cell": name})


@contextmanager
def _on_ray(address: str) -> Iterator[tuple[Submit, int]]:
    """Tasks of a Ray cluster; its machines must share the folder and find the data at the same path."""
    try:
        import ray
    except ImportError:
        raise RecipeError("--ray: Ray is not installed here; pip install ray") from None
    ray.init(address=address, log_to_driver=False, include_dashboard=False if address == "local" else None)
    try:
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        gpus = int(resources.get("GPU", 0))
        task = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=0)(work)
        yield (
            lambda cell, folder, deadline: task.remote(_in_turn(cell, {}), folder.resolve(), deadline).future(),
            max(1, gpus or int(resources["CPU"])),
        )
    finally:
        ray.shutdown()
