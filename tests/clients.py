"""Small clients on real digits, for tests that train one or two of them."""

from __future__ import annotations

from typing import Any

import torch

from conftest import small_recipe
from oneround import acts
from oneround.config.load import load
from oneround.data import Dataset, Images
from oneround.protocol import Broadcast, Upload
from oneround.server.plan import DealtPlan
from oneround.site import Site

SMALL: dict[str, Any] = {
    "model.encoder": {"kind": "cnn", "width": 4}, "training.batch_size": 32, "fusion": ["iffi"],
}  # fmt: skip


def few(digits: Dataset, classes: int = 10, samples: int = 128) -> Images:
    """Samples of the first so many classes."""
    return digits.train.take(torch.nonzero(digits.train.labels < classes)[:samples, 0])


def some(digits: Dataset, samples: int) -> Site:
    """A site with the first so many samples."""
    return Site("site", digits.train.take(torch.arange(samples)))


def broadcast_of(digits: Dataset, preset: str, epochs: int | None = None, **changes: Any) -> Broadcast:
    """What a federation on digits sends; a preset with a narrow network, changed by `a__b=value`."""
    overrides = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    if epochs is not None:
        overrides["training.epochs"] = epochs
    return DealtPlan.of(load(preset, overrides.items()), digits).prepare()


def trained(
    digits: Dataset, preset: str, epochs: int | None = None, classes: int = 10, samples: int = 128, **changes: Any
) -> Upload:
    """The upload of one site with a few samples of the first so many classes."""
    return acts.train(broadcast_of(digits, preset, epochs, **changes), Site("site", few(digits, classes, samples)))


def series(upload: Upload, key: str) -> list[float]:
    """One figure of the history, epoch by epoch."""
    return [entry[key] for entry in upload.history]


def prepared(digits: Dataset, preset: str = "fafi", **changes: Any) -> Broadcast:
    """The broadcast of a small recipe; the server has 200 public images."""
    recipe = acts.resolve(small_recipe(preset, **changes), digits)
    server = Site("server", digits.train.take(torch.arange(1000, 1200)))
    return acts.prepare(recipe, digits.class_names, digits.shape, server)
