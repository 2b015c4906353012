"""Tiny generators on real digits, for tests that train one or two of them."""

from __future__ import annotations

from typing import Any

from clients import SMALL
from oneround import acts
from oneround.config.load import load
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.protocol import Broadcast

TINY: dict[str, Any] = {
    "generator.network": {"kind": "unet", "widths": [8, 16], "blocks": [1, 1], "attention": [1], "head": 8},
    "generator.epochs": 2, "generator.batch_size": 32,
}  # fmt: skip


def generating(digits: Dataset, preset: str = "fafi", **changes: Any) -> Recipe:
    """A resolved recipe whose clients train a tiny generator after one epoch of a tiny network."""
    overrides = {
        "training.epochs": 1,
        **SMALL,
        **TINY,
        **{key.replace("__", "."): each for key, each in changes.items()},
    }
    return acts.resolve(load(preset, overrides.items()), digits)


def sent(digits: Dataset, preset: str = "fafi", **changes: Any) -> Broadcast:
    """The broadcast of such a recipe."""
    return acts.prepare(generating(digits, preset, **changes), digits.class_names, digits.shape)
