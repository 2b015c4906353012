"""A site's own images: a folder by class, an .npz file or a function of the site's. Classes are matched by name, never by number."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oneround.data import files
from oneround.data.images import Images, images_from_arrays
from oneround.errors import DataError, UnlikeData
from oneround.parts import load_plugin

Shape = tuple[int, int, int]
_FUNCTION = re.compile(r"^([A-Za-z_][\w.]*):([A-Za-z_]\w*)$")


def own_images(source: str, class_names: Sequence[str], shape: Shape, labels: Mapping[str, str]) -> Images:
    """Read a site's images for a task with these classes and (channels, height, width); `labels` renames the site's classes."""
    found = _FUNCTION.match(source)
    if found:
        pixels, names = _from_function(source, _function(source, found[1], found[2]))
    elif source.endswith(".npz"):
        pixels, names = _from_npz(Path(source))
    else:
        pixels, names = _from_folder(Path(source), shape)
    known = {name: number for number, name in enumerate(class_names)}
    meant = [labels.get(name, name) for name in names]
    strange = sorted(set(meant) - known.keys())
    if strange:
        raise UnlikeData(
            f"{source}: the recipe does not know {_listed(strange)}; it knows {_listed(class_names)}. "
            "Rename them, leave them out, or say in labels what they are called there"
        )
    images = images_from_arrays(source, pixels, np.array([known[name] for name in meant], np.int64))
    if tuple(images.pixels.shape[1:]) != shape:
        raise UnlikeData(
            f"{source}: images of (channels, height, width) {tuple(images.pixels.shape[1:])}; this federation's are {shape}"
        )
    return images


def _listed(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(f"'{name}'" for name in names[:most]) + (f" and {len(names) - most} more" * (len(names) > most))


def _from_folder(path: Path, shape: Shape) -> tuple[Any, list[str]]:
    """CLASS/image.png, or train/CLASS/image.png, of which only the training part is taken."""
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; data is a folder of images by class, an .npz file or module:function")
    found = {name: opener for name, opener in files.tree(path).items() if files.is_image(name)}
    words = {name: name.split("/") for name in found}
    if words and all(parts[0] in ("train", "test", "val") and len(parts) > 2 for parts in words.values()):
        words = {name: parts[1:] for name, parts in words.items() if parts[0] == "train"}
    flat = next((name for name, parts in words.items() if len(parts) < 2), None)
    if flat or not words:
        raise DataError(
            f"{path}: {f'{flat} lies outside any class folder' if flat else 'no image in it'}; expected CLASS/image.png"
        )
    channels, height, width = shape
    return files.decode_images(str(path), [(name, found[name]) for name in words], (width, height), channels), [
        parts[0] for parts in words.values()
    ]


def _from_npz(path: Path) -> tuple[Any, list[str]]:
    """x and y, or x_train and y_train; y holds names, or numbers into class_names, or numbers that are the names."""
    content = files.read_npz(path)
    for images, labels in (("x", "y"), ("x_train", "y_train")):
        if images in content and labels in content:
            return content[images], _names(str(path), content[labels], content.get("class_names"))
    raise DataError(f"{path}: no x and y in it, nor x_train and y_train (it has {', '.join(content) or 'nothing'})")


def _from_function(source: str, function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a site's own function returns: images, labels and, if labels are numbers into a list, that list."""
    try:
        told = function()
    except Exception as error:  # whatever the site's own code raises
        raise DataError(f"{source}: failed with {type(error).__name__}: {' '.join(str(error).split())}") from None
    if not isinstance(told, tuple) or len(told) not in (2, 3):
        raise DataError(
            f"{source}: returned {type(told).__name__}; return (images, labels) or (images, labels, class_names)"
        )
    return told[0], _names(source, np.asarray(told[1]), np.asarray(told[2]) if len(told) == 3 else None)


def _function(source: str, module: str, name: str) -> Callable[[], Any]:
    load_plugin(module)
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise DataError(f"{source}: {module} has no function {name}")
    return function  # type: ignore[no-any-return]


def _names(where: str, labels: Any, class_names: Any) -> list[str]:
    if labels.ndim != 1:
        raise DataError(f"{where}: labels have shape {labels.shape}; give one per image")
    if class_names is None or labels.dtype.kind in "US":
        return [str(label) for label in labels.tolist()]
    names = [str(name) for name in class_names]
    if labels.dtype.kind not in "iu" or (labels.size and not 0 <= int(labels.min()) <= int(labels.max()) < len(names)):
        raise DataError(f"{where}: labels must be numbers from 0 to {len(names) - 1}, places in class_names")
    return [names[label] for label in labels.tolist()]
