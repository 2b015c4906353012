"""Labelled images: the data type used in the whole package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oneround.errors import DataError

Shape = tuple[int, int, int]
"""Of an image: (channels, height, width)."""
BATCH = 500  # images that a network sees at a time when nothing is trained
BATCH_PIXELS = (
    2**16
)  # of all images that a CPU scores at a time: more leave its caches, and memory is given back in between


@dataclass(frozen=True)
class Images:
    """Images of one client or of the server: `pixels` uint8 (n, channels, height, width), `labels` int64 (n,)."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: NDArray[np.int64] | Tensor) -> Images:
        chosen = torch.as_tensor(index, dtype=torch.int64).to(self.pixels.device)
        pixels = self.pixels.index_select(0, chosen)  # on a CPU far faster than pixels[chosen]
        return Images(pixels, self.labels[chosen])

    def to(self, device: torch.device) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device))

    def batches(
        self, device: torch.device, mean: float, std: float, sizes: int | Sequence[int] = BATCH
    ) -> Iterator[Tensor]:
        """Normalised floats on the device, in batches of `sizes` images, all alike or each of its own size."""
        for pixels in self.pixels.split(sizes if isinstance(sizes, int) else list(sizes)):
            yield (pixels.to(device).float() / 255 - mean) / std

    def scored_at_once(self, device: torch.device) -> int:
        """How many of these images a network scores at a time; the scores of an image do not depend on it."""
        if device.type != "cpu":
            return BATCH
        height, width = self.pixels.shape[2:]
        return min(BATCH, max(1, BATCH_PIXELS // (height * width)))

    def class_counts(self, classes: int) -> Tensor:
        """(classes,) int64"""
        return torch.bincount(self.labels.cpu(), minlength=classes)


@dataclass(frozen=True)
class Dataset:
    """A task: training images to partition, test images that nobody trains on, the names of the classes."""

    name: str
    train: Images
    test: Images
    class_names: tuple[str, ...]
    groups: NDArray[np.int64] | None = None
    """A group id per training sample, for natural partitions."""
    mirror: bool = True
    """Whether a mirror image keeps its label."""

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def shape(self) -> Shape:
        channels, height, width = self.train.pixels.shape[1:]
        return channels, height, width

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all pixels and labels: two data sets with the same name but other content differ."""
        digest = hashlib.sha256()
        for tensor in (self.train.pixels, self.train.labels, self.test.pixels, self.test.labels):
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()


def dataset_from_arrays(
    name: str,
    x_train: Any,
    y_train: Any,
    x_test: Any,
    y_test: Any,
    *,
    class_names: tuple[str, ...] | None = None,
    group_train: Any = None,
    mirror: bool = True,
) -> Dataset:
    """A data set from arrays: images (n, h, w), (n, h, w, c) or (n, c, h, w), uint8 or floats in 0…1; labels 0…C−1."""
    train = images_from_arrays(name, x_train, y_train, "_train")
    test = images_from_arrays(name, x_test, y_test, "_test")
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        shapes = [tuple(images.pixels.shape[1:]) for images in (train, test)]
        raise DataError(
            f"{name}: training images are {shapes[0]} but test images {shapes[1]} (channels, height, width)"
        )
    channels, height, width = train.pixels.shape[1:]
    if channels not in (1, 3) or not (8 <= height <= 64 and 8 <= width <= 64):
        raise DataError(
            f"{name}: images of {channels} channels, {height}×{width} pixels; "
            "1 or 3 channels and 8 to 64 pixels are supported (image folders: set data.size)"
        )
    names = _class_names(name, train, test, class_names)
    groups = None if group_train is None else _groups(name, group_train, len(train))
    return Dataset(name, train, test, names, groups, mirror)


def images_from_arrays(name: str, x: Any, y: Any, part: str = "") -> Images:
    """Images and their labels, checked; `part` (`_train`, `_test`) names them in errors."""
    images = Images(_pixels(name, f"x{part}", x), _labels(name, f"y{part}", y))
    if len(images.pixels) != len(images.labels):
        raise DataError(f"{name}: {len(images.pixels)} images but {len(images.labels)} labels in x{part}, y{part}")
    if len(images) == 0:
        raise DataError(f"{name}: x{part} is empty")
    return images


def _class_names(name: str, train: Images, test: Images, class_names: tuple[str, ...] | None) -> tuple[str, ...]:
    """The given names, or 0…C−1; every label must have one."""
    lowest, highest = (int(label) for label in torch.cat([train.labels, test.labels]).aminmax())
    if class_names is None and highest >= len(train):
        raise DataError(
            f"{name}: a label of {highest} means {highest + 1} classes, more than the {len(train)} training images; "
            "number the classes from 0 without gaps, or give class_names"
        )
    names = class_names or tuple(str(label) for label in range(highest + 1))
    if lowest < 0 or highest >= len(names):
        raise DataError(
            f"{name}: labels run from {lowest} to {highest}, but there are {len(names)} classes (0 to {len(names) - 1})"
        )
    if len(names) < 2:
        raise DataError(f"{name}: only one class; a classifier needs at least 2")
    return names


def _groups(name: str, group_train: Any, samples: int) -> NDArray[np.int64]:
    """Group ids of any type → 0…G−1, one per training sample."""
    ids = np.asarray(group_train).reshape(-1)
    if len(ids) != samples:
        raise DataError(f"{name}: {len(ids)} group ids for {samples} training images (group_train)")
    missing = ids != ids  # true only for NaN and NaT
    if missing.any():
        raise DataError(
            f"{name}: group_train is {ids[missing][0]} for {int(missing.sum())} of {samples} training images; "
            "give every image a group"
        )
    return np.unique(ids, return_inverse=True)[1].astype(np.int64).reshape(-1)


def _pixels(name: str, key: str, values: Any) -> Tensor:
    array = np.asarray(values)
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4:
        raise DataError(
            f"{name}: {key} has {array.ndim} dimensions; images are (n, h, w), (n, h, w, c) or (n, c, h, w)"
        )
    if array.shape[-1] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if np.issubdtype(array.dtype, np.floating):
        if array.size and not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise DataError(f"{name}: {key} holds floats outside 0…1; give uint8 0…255 or floats 0…1")
        array = np.round(array * 255)
    elif array.dtype != np.uint8 and (
        not np.issubdtype(array.dtype, np.integer) or (array.size and (array.min() < 0 or array.max() > 255))
    ):
        raise DataError(f"{name}: {key} is {array.dtype}; give uint8 0…255 or floats 0…1")
    return torch.from_numpy(np.array(array, np.uint8, order="C", copy=True))


def _labels(name: str, key: str, values: Any) -> Tensor:
    array = np.asarray(values)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{name}: {key} must be one whole number per image, got {array.dtype} with shape {array.shape}")
    if array.size and int(array.max()) >= 2**63:
        raise DataError(f"{name}: {key} holds a label of {int(array.max())}; labels are 0, 1, 2, … one per class")
    return torch.from_numpy(array.astype(np.int64))
