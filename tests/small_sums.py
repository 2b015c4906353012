"""Small sums of real digits."""

from __future__ import annotations

from typing import Any

import numpy as np

from oneround import acts
from oneround.config.load import load
from oneround.data import Dataset
from oneround.protocol import Broadcast, Upload
from oneround.site import Site

SMALL = {"sums.features": {"kind": "patches", "size": 96, "patch": 4}}


def broadcast_of(data: Dataset, **changes: Any) -> Broadcast:
    """The broadcast of the preset ridge with few features, changed by `a__b=value`."""
    overrides = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    recipe = acts.resolve(load("ridge", overrides.items()), data)
    return acts.prepare(recipe, data.class_names, data.shape)


def upload_of(broadcast: Broadcast, data: Dataset, name: str, index: np.ndarray) -> Upload:
    return acts.train(broadcast, Site(name, data.train.take(index)))
