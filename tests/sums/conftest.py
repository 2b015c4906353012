"""What the tests of sums share."""

from __future__ import annotations

import pytest
from small_sums import sent

from oneround.data import Dataset
from oneround.protocol import Broadcast


@pytest.fixture(scope="session")
def broadcast(digits: Dataset) -> Broadcast:
    return sent(digits)
