"""Small sums of real digits."""

from __future__ import annotations

from typing import Any

from oneround import acts
from oneround.data import Dataset
from oneround.protocol import Broadcast
from oneround.reading import load

SMALL = {"sums.features": {"kind": "patches", "size": 96, "patch": 4}}


def sent(data: Dataset, **changes: Any) -> Broadcast:
    """The broadcast of the preset ridge with few features, changed by `a__b=value`."""
    given = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    recipe = acts.settle(load("ridge", given.items()), data)
    return acts.prepare(recipe, data.class_names, data.shape)
