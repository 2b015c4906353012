"""What several tests share: real digits, small recipes, and sites that train in no time."""

from __future__ import annotations

import os
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oneround import acts
from oneround.crew import forked_from
from oneround.data import Dataset, dataset_from_arrays, load_dataset, partitions
from oneround.errors import OutOfTime
from oneround.fusion import rules
from oneround.protocol import Broadcast, Upload
from oneround.reading import load
from oneround.recipe import Recipe
from oneround.simulate import run
from oneround.site import Site

torch.set_num_threads(1)
os.environ.setdefault("ONEROUND_COMMIT", "under test")  # whatever somebody edits meanwhile
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start: tests run side by side, one for a core


LONG = ("test_deployment", "test_simulate", "test_sweep", "test_examples", "test_cli", "test_readme", "test_docs")
"""Files whose tests begin first, so that workers which share the files end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="session", autouse=True)
def loaded() -> None:
    """A process that has loaded what commands and workers need begins now; they are forked from it."""
    forked_from("oneround.cli", "oneround.sweep", "oneround.study", "oneround.report", "matplotlib.figure")
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_dataset(load("fafi").data)


NETWORK_RULES = [kind for kind in sorted(rules.kinds) if not rules.parse(kind).needs_public]
"""Rules that need uploads and nothing else."""


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
    recipe = acts.settle(given, digits)
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
