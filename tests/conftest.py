"""What several tests share: real digits, small recipes, and sites that train in no time."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import reports
from commands import SMALL, good
from grids import make_grid
from oneround import acts
from oneround.config.load import load
from oneround.config.recipe import Recipe
from oneround.data import Dataset, dataset_from_arrays, load_dataset, partitions
from oneround.errors import OutOfTime
from oneround.fusion import rules
from oneround.processes import forked_from
from oneround.protocol import Broadcast, Upload
from oneround.simulate import run
from oneround.site import Site

torch.set_num_threads(1)
os.environ.setdefault("ONEROUND_COMMIT", "under test")  # whatever somebody edits meanwhile
# Headers that PyTorch's compiler has precompiled serve one installation only, and it looks for them where all share them.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(sys.prefix) / "inductor_cache"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start: tests run side by side, one for a core


LONG = (
    "test_deployment", "test_workers", "test_sweep", "test_examples", "test_running", "test_using", "test_main", "test_server_app",
    "test_simulation", "test_exchange", "test_ray_pool", "test_readme", "test_docs",
)  # fmt: skip
"""Files whose tests begin first, so that workers which share the files end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
        if isinstance(item, pytest.Function) and _starts_processes(item.module):
            item.add_marker("processes")
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def _starts_processes(module: ModuleType) -> bool:
    """Whether a test file uses commands, or anything else that runs in a process of its own."""
    sources = {
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        for value in vars(module).values()
    }
    return bool(
        sources & {"commands", "puppets", "site_process", "subprocess", "multiprocessing", "oneround.processes"}
    )


@pytest.fixture(scope="session", autouse=True)
def loaded(request: pytest.FixtureRequest) -> None:
    """A process that has loaded what commands and workers need begins now, if a test needs it; they are forked from it."""
    if not any(item.get_closest_marker("processes") for item in request.session.items):
        return
    forked_from(
        "oneround.cli", "oneround.studies.sweep", "oneround.studies.study", "oneround.report", "matplotlib.figure"
    )
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_dataset(load("fafi").data)


NETWORK_RULES = [
    kind
    for kind, needs in ((kind, rules.parse(kind).needs) for kind in sorted(rules.kinds))
    if not (needs.public or needs.experts or needs.generator)
]
"""Rules that need networks or sums of one exchange and nothing else."""


def small_recipe(preset: str = "fafi", **changes: Any) -> Recipe:
    """A preset on digits with a narrow network and one epoch, changed by `a__b=value`."""
    base = {"model.encoder": {"kind": "cnn", "width": 4}, "training.epochs": 1, "training.batch_size": 64}
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return load(preset, [*{**base, **given}.items()])


def run_in_parts(recipe: Recipe, folder: Path, data: Dataset) -> int:
    """Run with no time at all and resume until it is finished; how often it was stopped."""
    for stops in range(100):
        try:
            run(recipe, folder, data=data, resume=True, deadline=time.time())
            return stops
        except OutOfTime:
            continue
    raise AssertionError("it never ends")


def labelled(labels: Any, classes: int | None = None, groups: Any = None) -> Dataset:
    """A data set that is all labels: blank images."""
    labels = np.asarray(labels)
    names = tuple(str(label) for label in range(classes or max(int(labels.max()) + 1, 2)))
    blank = np.zeros((len(labels), 8, 8), np.uint8)
    return dataset_from_arrays("labels", blank, labels, blank[:1], labels[:1], class_names=names, group_train=groups)


@pytest.fixture(scope="session")
def federation(digits: Dataset) -> tuple[Recipe, Broadcast, list[Upload]]:
    """A trained federation of three clients on digits, with sums and every built-in rule's statistics."""
    first = [part.kind for part in small_recipe().fusion]
    fusion = [*first, *sorted(set(NETWORK_RULES) - set(first))]
    sums = {"features": {"kind": "patches", "size": 96, "patch": 4}}
    given = small_recipe(partition__clients=3, partition__alpha=0.3, training__epochs=2, fusion=fusion, sums=sums)
    recipe = acts.resolve(given, digits)
    split = partitions.of(recipe.partition).split(digits, 1)
    broadcast = acts.prepare(recipe, digits.class_names, digits.shape)
    uploads = [
        acts.train(broadcast, Site(f"client_{k}", digits.train.take(index))) for k, index in enumerate(split.clients)
    ]
    return recipe, broadcast, uploads


@pytest.fixture()
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def grid(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fafi and v9 on partitions 1 and 2, fafi twice on each."""
    return make_grid(tmp_path_factory.mktemp("grid"), digits)


@pytest.fixture(scope="session")
def reported_run(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with λ and three snapshots, whose first class has a hostile name."""
    return reports.make_run(tmp_path_factory.mktemp("report") / "run", digits)


@pytest.fixture(scope="session")
def reported_sweep(reported_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods on four partitions; the second is better by about five points, every time."""
    return reports.make_sweep(tmp_path_factory.mktemp("sweep"), reported_run)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command line that is finished."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    asked = "run fafi --data digits --clients 3 --alpha 0.1 --epochs 2 --seed 4 --model cnn"
    output = good(*asked.split(), "--out", str(folder), *SMALL)
    for part in (
        "1,442 training",
        "parameters",
        "down",
        "epoch 2:",
        "typicality-gated",
        "client_000 alone",
        str(folder),
    ):
        assert part in output
    return folder
