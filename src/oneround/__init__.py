"""oneround: one-shot federated learning.

import oneround

recipe = oneround.load("fafi", {"data.kind": "digits", "training.epochs": 20})
result = oneround.run(recipe, "runs/first")
model = oneround.GlobalModel.load("runs/first/model")
"""
# ruff: noqa: F403, F405 — type checkers take the names from `api`

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oneround.api import *

__version__ = "0.1.0"
__all__ = [
    "Broadcast", "GlobalModel", "Recipe", "Site", "Upload", "change", "dataset_from_arrays", "fuse", "load", "prepare", "resolve",
    "run", "settle", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names are loaded when first used."""
    if name not in __all__:
        raise AttributeError(f"module 'oneround' has no attribute {name!r}")
    from oneround import api

    return getattr(api, name)
