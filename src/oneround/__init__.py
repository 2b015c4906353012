"""oneround: one-shot federated learning.

import oneround

recipe = oneround.load("fafi", [("data.kind", "digits"), ("training.epochs", 20)])
result = oneround.run(recipe, Path("runs/first"))
model = oneround.GlobalModel.load(Path("runs/first/model"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oneround.acts import fuse, prepare, settle, train
    from oneround.data import dataset_from_arrays
    from oneround.protocol import Broadcast, GlobalModel, Upload
    from oneround.reading import change, load
    from oneround.recipe import Recipe
    from oneround.simulate import run
    from oneround.site import Site

__version__ = "0.1.0"
__all__ = [
    "Broadcast", "GlobalModel", "Recipe", "Site", "Upload", "change", "dataset_from_arrays", "fuse", "load", "prepare", "run", "settle", "train",
]  # fmt: skip

_HOMES = {
    "acts": ("fuse", "prepare", "settle", "train"),
    "data": ("dataset_from_arrays",),
    "protocol": ("Broadcast", "GlobalModel", "Upload"),
    "reading": ("change", "load"),
    "recipe": ("Recipe",),
    "simulate": ("run",),
    "site": ("Site",),
}


def __getattr__(name: str) -> Any:
    """Names are loaded when first used, so that `oneround --help` does not wait for PyTorch."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"oneround.{module}"), name)
    raise AttributeError(f"module 'oneround' has no attribute {name!r}")
