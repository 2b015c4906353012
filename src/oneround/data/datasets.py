"""Data sets: the slot, the embedded digits, and the open doors (an .npz file, a folder of images, arrays from Python)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from oneround.data import files
from oneround.data.images import Dataset, Images, dataset_from_arrays
from oneround.data.own import own_images
from oneround.errors import DataError
from oneround.parts import Part, Slot

Size = Annotated[int, Field(ge=8, le=64)]


class Loader(Part):
    """A data set that can be loaded. `mirror`: whether a mirror image keeps its label."""

    mirror: ClassVar[bool] = True
    elsewhere: ClassVar[bool] = False
    """Whether the training images are at the sites, so that there is nothing to deal out here."""

    def load(self, path: Path | None) -> Dataset:
        """Read it from `path` (a folder, or the file itself), or from the cache, filling it if needed."""
        raise NotImplementedError


datasets: Slot[Loader] = Slot("data", Loader, default="digits")


def load_dataset(part: Part, path: Path | None = None) -> Dataset:
    """The data set a recipe names."""
    return datasets.of(part).load(path)


@datasets.register("digits")
class Digits(Loader):
    """1,797 handwritten digits of 8×8 pixels that come with scikit-learn; every fifth of each class is held out."""

    mirror: ClassVar[bool] = False

    def load(self, path: Path | None) -> Dataset:
        content = np.loadtxt(_digits_file(), delimiter=",")
        pixels = np.round(content[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        labels = content[:, -1].astype(np.int64)
        rank = np.zeros(len(labels), np.int64)  # the how-many-eth of its class a sample is
        for digit in range(10):
            rank[labels == digit] = np.arange((labels == digit).sum())
        test = rank % 5 == 4
        return dataset_from_arrays(self.kind, pixels[~test], labels[~test], pixels[test], labels[test], mirror=False)


def _digits_file() -> Path:
    """Where scikit-learn keeps them. Importing it, to ask it, takes longer than training a client on them."""
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
        found = {name: opener for name, opener in files.tree(path).items() if files.is_image(name)}
        parts = {name: name.split("/") for name in found}
        split = {"train": "train", "training": "train", "test": "test", "testing": "test", "val": "test"}
        has_split = bool(found) and all(words[0].lower() in split and len(words) > 2 for words in parts.values())
        depth = 1 if has_split else 0
        flat = [name for name, words in parts.items() if len(words) <= depth + 1]
        if flat or not found:
            what = f"{flat[0]} lies outside any class folder" if flat else "no image in it"
            raise DataError(
                f"{path}: {what}; expected train/CLASS/image.png and test/CLASS/image.png, or CLASS/image.png"
            )
        labelled: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
        for name, words in parts.items():
            labelled[split[words[0].lower()] if has_split else "train"].append((name, words[depth]))
        names = sorted({label for _, label in labelled["train"]})
        for name, label in labelled["test"]:
            if label not in names:
                raise DataError(f"{path}/{name}: class '{label}' has no training image")
        if not labelled["test"]:
            labelled = self._hold_out(labelled["train"])
            if not labelled["test"]:
                raise DataError(
                    f"{path}: data.held_out = {self.held_out:g} of each class leaves no image to test on; "
                    "add images, or a test folder (test/CLASS/…), or raise data.held_out"
                )
        return decoded(self, path.name, str(path), found, labelled, tuple(names), self.size, 1 if self.grey else 3)

    def _hold_out(self, every: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
        """The last `held_out` of each class, in file-name order after a fixed shuffle."""
        order = np.random.RandomState(0).permutation(len(every))
        kept: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
        for label in sorted({label for _, label in every}):
            mine = [every[at] for at in order if every[at][1] == label]
            cut = len(mine) - int(len(mine) * self.held_out)
            kept["train"] += mine[:cut]
            kept["test"] += mine[cut:]
        return kept


@datasets.register("sites")
class Sites(Loader):
    """Every site has its own images; the recipe says which classes there are and how large an image is.

    The server needs none. It may have test images, to score the model, and public ones, for methods that need some: `test` and
    `public` in its `local.data_path`, each a folder of images by class or an .npz file (`test.npz`).
    """

    elsewhere: ClassVar[bool] = True
    classes: Annotated[list[str], Field(min_length=2)]
    """Their names; a site's classes are matched by name."""
    size: Size = 32
    """Images are this many pixels a side."""
    grey: bool = False
    """One channel instead of three."""

    def load(self, path: Path | None) -> Dataset:
        shape = (1 if self.grey else 3, self.size, self.size)

        def part(name: str) -> Images:
            there = [path / word for word in (name, f"{name}.npz") if (path / word).exists()] if path else []
            if there:
                return own_images(str(there[0]), self.classes, shape, {})
            return Images(torch.zeros((0, *shape), dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))

        return Dataset(self.kind, part("public"), part("test"), tuple(self.classes))


@datasets.register("arrays")
class Arrays(Loader):
    """Arrays handed in from Python: `simulate.run(recipe, folder, data=dataset_from_arrays(...))`."""

    def load(self, path: Path | None) -> Dataset:
        raise DataError("data = arrays: hand the data set in from Python, or name a .npz file with --data")


def from_npz(path: Path, name: str, names: tuple[str, ...] = (), mirror: bool = True) -> Dataset:
    content = files.read_npz(path)
    missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if key not in content]
    if missing:
        raise DataError(f"{path}: no {', '.join(missing)} in it; expected x_train, y_train, x_test, y_test")
    given = _names_in(path, content["class_names"]) if "class_names" in content else names
    made = dataset_from_arrays(
        name,
        *(content[key] for key in ("x_train", "y_train", "x_test", "y_test")),
        class_names=given or None,
        group_train=content.get("group_train"),
        mirror=mirror,
    )
    if not given:
        _check_numbers(path, made)
    return made


def _check_numbers(path: Path, made: Dataset) -> None:
    """Labels without names count from 0, and each has a training image."""
    missing = np.flatnonzero(np.bincount(made.train.labels.numpy(), minlength=made.classes) == 0)
    if len(missing):
        raise DataError(
            f"{path}: no training image has the label {missing[0]}, and labels go up to {made.classes - 1}; "
            "count them from 0 without gaps, or name all classes in class_names"
        )


def _names_in(path: Path, given: files.Array) -> tuple[str, ...]:
    if given.ndim != 1:
        raise DataError(f"{path}: class_names has shape {given.shape}; give a list of names, one per class")
    return tuple(str(word) for word in given)


def decoded(
    loader: Loader,
    name: str,
    where: str,
    found: dict[str, files.Opener],
    labelled: dict[str, list[tuple[str, str]]],
    class_names: tuple[str, ...],
    size: int,
    channels: int,
) -> Dataset:
    """A data set from lists of (file name, class name)."""
    number = {label: index for index, label in enumerate(class_names)}
    arrays: list[Any] = []
    for part in ("train", "test"):
        lost = next((file for file, label in labelled[part] if file not in found or label not in number), None)
        if lost is not None:
            raise DataError(f"{where}: {lost} is listed but its file or class is missing")
        arrays.append(
            files.decode_images(where, [(file, found[file]) for file, _ in labelled[part]], (size, size), channels)
        )
        arrays.append(np.array([number[label] for _, label in labelled[part]], np.int64))
    return dataset_from_arrays(name, *arrays, class_names=class_names, mirror=loader.mirror)
