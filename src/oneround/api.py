"""What `import oneround` offers; loaded when first used, so that `oneround --help` does not wait for PyTorch."""

from oneround.acts import fuse, prepare, resolve, train
from oneround.config.load import change, load
from oneround.config.recipe import Recipe
from oneround.data import dataset_from_arrays
from oneround.global_model import GlobalModel
from oneround.protocol import Broadcast, Upload
from oneround.simulate import run
from oneround.site import Site

settle = resolve  # the name in version 0.1
__all__ = [
    "Broadcast", "GlobalModel", "Recipe", "Site", "Upload", "change", "dataset_from_arrays", "fuse", "load", "prepare", "resolve",
    "run", "settle", "train",
]  # fmt: skip
