"""A grid of runs: methods × α × partitions × seeds × any recipe key; every cell is a run folder.

Finished cells are skipped and unfinished ones resumed, so a sweep can be stopped at any moment (or by its own time budget, between
epochs) and started again. Cells run in parallel on the machine's cores or GPUs, or as tasks of a Ray cluster.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, BeforeValidator, Field

from oneround.acts import resolve
from oneround.config.load import Overrides, change, checked, load, pairs, read_mapping
from oneround.config.parts import Strict
from oneround.config.recipe import Recipe
from oneround.config.sections import Seed
from oneround.data import Dataset, load_dataset
from oneround.errors import OneroundError, OutOfTime, RecipeError, RunError
from oneround.processes import begin_worker, forked_from, hidden_main, worker_pool
from oneround.runs.folder import RunFolder
from oneround.runs.record import flat
from oneround.simulate import run
from oneround.simulate.ray_pool import connected
from oneround.site import choose_device
from oneround.training import Emit, silent

MOST_SEEDS = 1000  # in a range


def _seed_list(value: Any) -> Any:
    """A range of seeds, `1-5`, as a list; anything else as it is."""
    match = re.fullmatch(r"(\d+)-(\d+)", value) if isinstance(value, str) else None
    if match is None:
        return value
    first, last = int(match[1]), int(match[2])
    if not first <= last < first + MOST_SEEDS:
        raise ValueError(f"{value} is no range of 1 to {MOST_SEEDS:,} seeds; give the first and the last, 1-5")
    return list(range(first, last + 1))


def _distinct(values: list[Any]) -> list[Any]:
    """Refuse a repeated value."""
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"names {value} twice")
    return values


T = TypeVar("T")
Distinct = Annotated[list[T], AfterValidator(_distinct)]
Values = Annotated[Distinct[T], Field(min_length=1)]
Seeds = Annotated[Values[Seed], BeforeValidator(_seed_list)]


class Grid(Strict):
    """Methods, partitions, seeds and recipe keys of a sweep."""

    methods: Values[str]
    """Presets by name or alias, or recipe files."""
    alpha: Distinct[Annotated[float, Field(gt=0)]] = Field(default=[])
    """Values of partition.alpha; default: each recipe's own."""
    partitions: Seeds = Field(default=[1])
    """Partition seeds: a list, or `1-5`."""
    seeds: Seeds = Field(default=[1])
    """Initialisation and training seeds: repeats on the same partition."""
    grid: dict[str, Values[Any]] = Field(default={})
    """Recipe keys with the values to try: `alignment.weight.value: [1, 5, 10]`."""
    set: dict[str, Any] = Field(default={})
    """Recipe keys that are the same in every cell."""


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    name: str
    """Its folder, relative to that of the sweep."""
    recipe: Recipe


def read_grid(path: str | PathLike[str]) -> dict[str, Any]:
    """The checked content of a sweep's YAML file; the command line may add to it."""
    path = Path(path)
    raw = read_mapping(path, "a sweep is a YAML mapping (methods: [...], partitions: 1-5, …)")
    with _naming(path):
        checked(Grid, raw)
    return raw


@contextmanager
def _naming(name: str | Path) -> Iterator[None]:
    """Prefix every line of a RecipeError with the file or preset that it is about."""
    try:
        yield
    except RecipeError as error:
        lines = [line if str(name) in line else f"{name}: {line}" for line in str(error).splitlines()]
        raise RecipeError("\n".join(lines)) from None


def cells(grid: Grid, local: Overrides = ()) -> list[Cell]:
    """Every combination; methods vary fastest, so that after each partition all methods can be compared."""
    varied: dict[str, list[Any]] = {**({"partition.alpha": grid.alpha} if grid.alpha else {}), **grid.grid}
    combinations = list(itertools.product(*([(key, value) for value in values] for key, values in varied.items())))
    local = list(pairs(local))
    grid_cells, methods = list[Cell](), dict[str, str]()
    for partition, seed, changed, method in itertools.product(grid.partitions, grid.seeds, combinations, grid.methods):
        seeds = [("seeds.partition", partition), ("seeds.initialisation", seed), ("seeds.training", seed)]
        with _naming(method):
            recipe = load(method, [*grid.set.items(), *changed, *seeds, *local])
        parts = [Path(method).stem, *(f"{key.split('.')[-1]}={_file_name(value)}" for key, value in changed)]
        run_name = f"partition_{partition}" + (f"_seed_{seed}" if len(grid.seeds) > 1 else "")
        name = f"{'_'.join(parts)}/{run_name}"
        if name in methods:
            raise RecipeError(f"{methods[name]} and {method}: both would be kept in {name}; give one file another name")
        methods[name] = method
        grid_cells.append(Cell(name, recipe))
    return grid_cells


def part_of(grid_cells: Sequence[T], part: str) -> list[T]:
    """A part of a sweep, for one of several machines: `2/5` is every fifth cell, from the second on."""
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise RecipeError(f"--part {part}: must be a part and the number of parts, from 1/5 to 5/5")
    return list(grid_cells[int(match[1]) - 1 :: int(match[2])])


def _file_name(value: Any) -> str:
    return re.sub(r"[^\w.+-]+", "-", str(value))


@dataclass(frozen=True)
class Progress:
    """Names of the finished, failed and remaining cells of a sweep."""

    done: tuple[str, ...]
    failed: Mapping[str, str]
    """Name → error message."""
    left: tuple[str, ...]


def sweep(
    grid_cells: Sequence[Cell],
    folder: str | PathLike[str],
    *,
    minutes: float | None = None,
    workers: int | None = None,
    ray: str | None = None,
    emit: Emit = silent,
) -> Progress:
    """Run the cells that are not finished. A cell that fails is reported, and the others go on."""
    if minutes is not None and not minutes > 0:
        raise RecipeError(f"--minutes {minutes}: must be a number above 0")
    folder = Path(folder)
    deadline = time.time() + 60 * minutes if minutes else None

    def is_done(cell: Cell) -> bool:
        return RunFolder(folder / cell.name).result.exists()

    waiting = [cell for cell in grid_cells if not is_done(cell)]
    emit({"event": "sweep", "cells": len(grid_cells), "done": len(grid_cells) - len(waiting)})
    failed: dict[str, str] = {}
    for cell in grid_cells:  # before anything trains, so that a mistake in the last cell shows at once
        _check_folder(cell, folder)
    _loaded.clear()
    with _on_ray(ray) if ray else _on_this_machine(workers, waiting, emit) as (submit, width):
        queue = iter(waiting)
        running: dict[Future[dict[str, float]], str] = {}
        while True:
            in_time = deadline is None or time.time() < deadline
            for cell in itertools.islice(queue, width - len(running) if in_time else 0):
                running[submit(cell, folder, deadline)] = cell.name
            if not running:
                break
            for task in wait(running, return_when=FIRST_COMPLETED).done:
                _record_outcome(task, running.pop(task), failed, emit)
    done = tuple(cell.name for cell in grid_cells if is_done(cell))
    left = tuple(cell.name for cell in grid_cells if cell.name not in done and cell.name not in failed)
    return Progress(done, failed, left)


def _check_folder(cell: Cell, folder: Path) -> None:
    """Refuse a cell whose folder holds a run of another recipe, finished or not."""
    run_folder = RunFolder(folder / cell.name)
    if not run_folder.recipe.exists():
        return
    stored, requested = run_folder.read_recipe(), resolve(cell.recipe, data_of(cell.recipe))
    if stored.digest != requested.digest:
        old, new = dict(flat(stored.plain())), dict(flat(requested.plain()))
        key = next(key for key in [*new, *old] if old.get(key) != new.get(key))
        raise RecipeError(
            f"{run_folder.path}: holds a run with {key} = {old.get(key)}, not {new.get(key)}; choose another --out"
        )


def _record_outcome(task: Future[dict[str, float]], name: str, failed: dict[str, str], emit: Emit) -> None:
    """Record and emit a cell's outcome."""
    try:
        accuracy = task.result()
    except OutOfTime:
        emit({"event": "cell", "name": name, "state": "stopped"})
    except OneroundError as error:
        failed[name] = str(getattr(error, "cause", error))  # Ray's own message is the traceback of the task
        emit({"event": "cell", "name": name, "state": "failed", "text": failed[name]})
    except BrokenProcessPool:
        raise RunError(
            "a worker of the sweep died (out of memory?); the same command goes on where it was, perhaps with fewer --workers"
        ) from None
    else:
        emit({"event": "cell", "name": name, "state": "done", "accuracy": accuracy})


def run_cell(
    cell: Cell, folder: Path, deadline: float | None, emit: Emit = silent, device: str | None = None
) -> dict[str, float]:
    """Run one cell in this process; returns the accuracy of every rule.

    On a CPU its clients train one after another, since the other cores run other cells.
    """
    recipe = cell.recipe
    if device is not None and recipe.local.device == "auto":
        recipe = change(recipe, {"local.device": device})
    elif choose_device(recipe.local.device).type == "cpu":
        recipe = change(recipe, {"local.workers": 1})
    result = run(recipe, folder / cell.name, data=data_of(recipe), resume=True, emit=emit, deadline=deadline)
    return dict(result.rules)


_loaded: dict[tuple[str, Path | None], Dataset] = {}


def data_key(recipe: Recipe) -> tuple[str, Path | None]:
    """The same for recipes with the same data set."""
    return json.dumps(recipe.data.dump(), sort_keys=True), recipe.local.data_path


def data_of(recipe: Recipe) -> Dataset:
    """The data set of a recipe; the process keeps the last one."""
    key = data_key(recipe)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = load_dataset(recipe.data, recipe.local.data_path)
    return _loaded[key]


# --- where cells run -------------------------------------------------------------------------------------------------

Submit = Callable[[Cell, Path, float | None], "Future[dict[str, float]]"]


@contextmanager
def _on_this_machine(workers: int | None, waiting: Sequence[Cell], emit: Emit) -> Iterator[tuple[Submit, int]]:
    """Processes on this machine: one per GPU, or one per core."""
    gpus = torch.cuda.device_count() if any(cell.recipe.local.device == "auto" for cell in waiting) else 0
    width = max(1, min(workers or gpus or os.cpu_count() or 1, len(waiting)))
    processes = forked_from(__name__)
    devices = processes.SimpleQueue()
    for number in range(width):
        devices.put(f"cuda:{number % gpus}" if gpus else None)
    with worker_pool(width, processes, emit, _begin_worker, devices) as pool, hidden_main():
        yield lambda cell, folder, deadline: pool.submit(_run_cell_here, cell, folder, deadline), width


_device: str | None = None
_emit: Emit = silent


def _begin_worker(events: Any, devices: Any) -> None:
    """The first call in a worker process."""
    global _device, _emit
    begin_worker()
    _device, _emit = devices.get(), events.put


def _run_cell_here(cell: Cell, folder: Path, deadline: float | None) -> dict[str, float]:
    """`run_cell` on this worker's device; events name the cell."""
    return run_cell(cell, folder, deadline, lambda event: _emit({**event, "cell": cell.name}), _device)


@contextmanager
def _on_ray(address: str) -> Iterator[tuple[Submit, int]]:
    """Tasks of a Ray cluster; its machines must share the folder and find the data at the same path."""
    with connected(address):
        import ray

        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        gpus = int(resources.get("GPU", 0))
        task = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=0)(run_cell)
        yield (
            lambda cell, folder, deadline: task.remote(cell, folder.resolve(), deadline).future(),
            max(1, gpus or int(resources["CPU"])),
        )
