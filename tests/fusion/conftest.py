"""What tests of several rules share."""

from __future__ import annotations

import pytest

from oneround.data import Dataset
from oracle import Federation, Oracle


@pytest.fixture(scope="module")
def oracle(federation: Federation, digits: Dataset) -> Oracle:
    return Oracle(federation, digits)
