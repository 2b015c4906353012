"""Data sets: the slot, the embedded digits, and loaders for your own data (an .npz file, a folder of images, arrays from Python)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from oneround.config.parts import Part, Slot
from oneround.data import files
from oneround.data.images import Dataset, Images, dataset_from_arrays
from oneround.data.own import own_images
from oneround.errors import DataError

Size = Annotated[int, Field(ge=8, le=64)]


class Loader(Part):
    """A data set that can be loaded."""

    mirror: ClassVar[bool] = True
    """Whether a mirror image keeps its label."""
    elsewhere: ClassVar[bool] = False
    """Whether the training images are at the sites, so that the server has none to partition."""

    def load(self, path: Path | None) -> Dataset:
        """Read the data set from `path` (a folder, or the file itself), or from the cache, downloading it if needed."""
        raise NotImplementedError


datasets: Slot[Loader] = Slot("data", Loader, default="digits")


def load_dataset(part: Part, path: str | PathLike[str] | None = None) -> Dataset:
    """The data set a recipe names."""
    return datasets.of(part).load(None if path is None else Path(path))


@datasets.register("digits")
class Digits(Loader):
    """1,797 handwritten digits of 8×8 pixels that come with scikit-learn; every fifth of each class is held out."""

    mirror = False

    def load(self, path: Path | None) -> Dataset:
        content = np.loadtxt(_digits_file(), delimiter=",")
        pixels = np.round(content[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        labels = content[:, -1].astype(np.int64)
        fifths = np.concatenate([np.flatnonzero(labels == digit)[4::5] for digit in range(10)])
        test = np.isin(np.arange(len(labels)), fifths)
        return dataset_from_arrays(self.kind, pixels[~test], labels[~test], pixels[test], labels[test], mirror=False)


def _digits_file() -> Path:
    """scikit-learn's file of the digits, found without importing scikit-learn, which takes longer than training on them."""
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


@datasets.register("npz")
class Npz(Loader):
    """Any .npz with x_train, y_train, x_test, y_test; class_names and group_train (for natural partitions) if present."""

    def load(self, path: Path | None) -> Dataset:
        if path is not None and path.is_dir():
            raise DataError(
                f"npz: local.data_path = {path} is a folder; name the file itself, --data {path}/FILE.npz without --data-dir"
            )
        if path is None or not path.is_file():
            raise DataError(f"npz: no file at local.data_path = {path}; name it with --data FILE.npz")
        return from_npz(path, path.stem)


@datasets.register("images")
class ImageFolder(Loader):
    """A folder of images by class: train/CLASS/… and test/CLASS/…, or CLASS/… from which a test part is held out."""

    size: Size = 32
    """Images are scaled to this many pixels a side."""
    grey: bool = False
    """Read one channel instead of three."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of each class kept for testing when there is no test folder."""

    def load(self, path: Path | None) -> Dataset:
        if path is None or not path.is_dir():
            raise DataError(f"images: no folder at local.data_path = {path}; name it with --data FOLDER")
        openers = files.tree(path)
        labelled = files.labelled_images(path, openers)
        if not labelled["test"]:
            labelled = self._hold_out(labelled["train"])
            if not labelled["test"]:
                raise DataError(
                    f"{path}: data.held_out = {self.held_out:g} of each class leaves no image to test on; "
                    "add images, or a test folder (test/CLASS/…), or raise data.held_out"
                )
        return dataset_from_files(self, path.name, str(path), openers, labelled, self.size, 1 if self.grey else 3)

    def _hold_out(self, every: list[tuple[str, str]]) -> files.Labelled:
        """The last `held_out` of each class, after a fixed shuffle of all files."""
        order = np.random.RandomState(0).permutation(len(every))
        parts: files.Labelled = {"train": [], "test": []}
        for label in sorted({label for _, label in every}):
            images = [every[at] for at in order if every[at][1] == label]
            kept = len(images) - int(len(images) * self.held_out)
            parts["train"] += images[:kept]
            parts["test"] += images[kept:]
        return parts


@datasets.register("sites")
class Sites(Loader):
    """Every site has its own images; the recipe says which classes there are and how large an image is.

    The server needs none. It may have test images, to score the model, and public ones, for methods that need some: `test` and
    `public` in its `local.data_path`, each a folder of images by class or an .npz file (`test.npz`).
    """

    elsewhere = True
    classes: Annotated[list[str], Field(min_length=2)]
    """Their names; a site's classes are matched by name."""
    size: Size = 32
    """Images are this many pixels a side."""
    grey: bool = False
    """One channel instead of three."""

    def load(self, path: Path | None) -> Dataset:
        shape = (1 if self.grey else 3, self.size, self.size)

        def part(name: str) -> Images:
            paths = [path / word for word in (name, f"{name}.npz") if (path / word).exists()] if path else []
            if paths:
                return own_images(str(paths[0]), self.classes, shape, {})
            return Images(torch.zeros((0, *shape), dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))

        return Dataset(self.kind, part("public"), part("test"), tuple(self.classes))


@datasets.register("arrays")
class Arrays(Loader):
    """Arrays handed in from Python: `simulate.run(recipe, folder, data=dataset_from_arrays(...))`."""

    def load(self, path: Path | None) -> Dataset:
        raise DataError("data = arrays: hand the data set in from Python, or name a .npz file with --data")


def from_npz(path: Path, name: str, default_names: tuple[str, ...] = (), mirror: bool = True) -> Dataset:
    """The data set in an .npz file; `default_names`: of its classes, if the file does not name them."""
    content = files.read_npz(path)
    missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if key not in content]
    if missing:
        raise DataError(f"{path}: no {', '.join(missing)} in it; expected x_train, y_train, x_test, y_test")
    names = content.get("class_names", np.array(default_names))
    if names.ndim != 1:
        raise DataError(f"{path}: class_names has shape {names.shape}; give a list of names, one per class")
    dataset = dataset_from_arrays(
        name,
        *(content[key] for key in ("x_train", "y_train", "x_test", "y_test")),
        class_names=tuple(map(str, names)) or None,
        group_train=content.get("group_train"),
        mirror=mirror,
    )
    unseen = np.flatnonzero(dataset.train.class_counts(dataset.classes) == 0)
    if not len(names) and len(unseen):
        raise DataError(
            f"{path}: no training image has the label {unseen[0]}, and labels go up to {dataset.classes - 1}; "
            "count them from 0 without gaps, or name all classes in class_names"
        )
    return dataset


def dataset_from_files(
    loader: Loader,
    name: str,
    where: str,
    openers: Mapping[str, files.Opener],
    labelled: files.Labelled,
    size: int,
    channels: int = 3,
) -> Dataset:
    """A data set from image files; its classes are those of the training images."""
    numbers = {label: number for number, label in enumerate(sorted({label for _, label in labelled["train"]}))}
    arrays: list[Any] = []
    for part in ("train", "test"):
        for file, label in labelled[part]:
            if file not in openers:
                raise DataError(f"{where}: {file} is listed but missing")
            if label not in numbers:
                raise DataError(f"{where}/{file}: class '{label}' has no training image")
        names = (file for file, _ in labelled[part])
        arrays.append(files.decode_images(where, openers, names, (size, size), channels))
        arrays.append(np.array([numbers[label] for _, label in labelled[part]], np.int64))
    return dataset_from_arrays(name, *arrays, class_names=tuple(numbers), mirror=loader.mirror)
