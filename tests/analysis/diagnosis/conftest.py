"""Real runs with something wrong, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diagnosis.doctored import Ran, recipe_of
from oneround.data import Dataset
from oneround.training import Batch
from oneround.training.objective import Term, terms


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="package")
def healthy(folder: Path, digits: Dataset) -> Ran:
    """Two clients with all classes alike: they learn, and fused they are better than each."""
    return Ran(folder / "healthy", digits, recipe_of("fafi", 4, partition={"kind": "iid", "clients": 2}, snapshots=2))


@pytest.fixture(scope="package")
def steady(folder: Path, digits: Dataset) -> Ran:
    """A learned λ that stays where it should."""
    return Ran(folder / "steady", digits, recipe_of("etf-decoupled", 6))


@pytest.fixture(scope="package")
def exploded(folder: Path, digits: Dataset) -> Ran:
    """V12 with σ that learn two hundred times too fast."""
    return Ran(folder / "exploded", digits, recipe_of("v12", 10, alignment__weight__rate=20.0, snapshots=2))


@pytest.fixture(scope="package")
def still(folder: Path, digits: Dataset) -> Ran:
    """Steps too small to learn anything; clients share data."""
    still = recipe_of("fafi", 2, training__learning_rate=1e-7, partition={"kind": "dirichlet-overlap", "clients": 2})
    return Ran(folder / "still", digits, still)


class Attraction(Term):
    """Pulls all features together, whatever their class."""

    def loss(self, batch: Batch) -> Tensor:
        return -20 * batch.unit.mean(0).square().sum() + 0 * batch.prototypes.sum()


@pytest.fixture(scope="package")
def collapsed(folder: Path, digits: Dataset) -> Iterator[Ran]:
    """A term that only attracts; the training images have no sample of the last class."""
    terms.register("test-attraction")(Attraction)
    fewer = digits.train.take(torch.nonzero(digits.train.labels < 9)[:, 0])
    data = Dataset("no nines", fewer, digits.test, digits.class_names, mirror=False)
    four = ("cross-entropy", "supervised-contrastive", "prototype-feature", "prototype-separation")
    weights = {"test-attraction": {}, **{name: {"weight": 0.0} for name in four}}
    yield Ran(folder / "collapsed", data, recipe_of("fafi", 4, objective={"terms": weights}, partition__clients=2))
    terms.kinds.pop("test-attraction")
