"""A site's own images: a folder by class, an .npz file or a function of the site's. Classes are matched by name, never by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oneround.config.parts import MODULE_AND_NAME, load_plugin
from oneround.data import files
from oneround.data.images import Images, Shape, images_from_arrays
from oneround.errors import DataError, DataMismatch, in_one_line

MAX_LISTED = 12  # names listed in a message


def own_images(source: str, class_names: Sequence[str], shape: Shape, labels: Mapping[str, str]) -> Images:
    """Read a site's images for a task with these classes and image shape; `labels` renames the site's classes."""
    match = MODULE_AND_NAME.fullmatch(source)
    if match:
        pixels, names = _from_function(source, *match.groups())
    elif source.endswith(".npz"):
        pixels, names = _from_npz(Path(source))
    else:
        pixels, names = _from_folder(Path(source), shape)
    class_of = [labels.get(name, name) for name in names]
    unknown = sorted(set(class_of) - set(class_names))
    if unknown:
        raise DataMismatch(
            f"{source}: the recipe does not know {_listed(unknown)}; it knows {_listed(class_names)}. "
            "Rename or remove them, or map them to the recipe's names in labels"
        )
    numbers = {name: number for number, name in enumerate(class_names)}
    images = images_from_arrays(source, pixels, np.array([numbers[name] for name in class_of], np.int64))
    if tuple(images.pixels.shape[1:]) != shape:
        raise DataMismatch(
            f"{source}: images of (channels, height, width) {tuple(images.pixels.shape[1:])}; this federation's are {shape}"
        )
    return images


def _listed(names: Sequence[str]) -> str:
    """The first names, quoted, and how many more there are."""
    return ", ".join(f"'{name}'" for name in names[:MAX_LISTED]) + (
        f" and {len(names) - MAX_LISTED} more" * (len(names) > MAX_LISTED)
    )


def _from_folder(path: Path, shape: Shape) -> tuple[Any, list[str]]:
    """CLASS/image.png, or train/CLASS/image.png, of which only the training part is taken."""
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; data is a folder of images by class, an .npz file or module:function")
    openers = files.tree(path)
    train = files.labelled_images(path, openers)["train"]
    if not train:
        raise DataError(f"{path}: no training image in it; expected train/CLASS/image.png or CLASS/image.png")
    channels, height, width = shape
    names, labels = zip(*train, strict=True)
    return files.decode_images(str(path), openers, names, (width, height), channels), list(labels)


def _from_npz(path: Path) -> tuple[Any, list[str]]:
    """x and y, or x_train and y_train; y holds names, or numbers into class_names, or numbers that are the names."""
    content = files.read_npz(path)
    for images, labels in (("x", "y"), ("x_train", "y_train")):
        if images in content and labels in content:
            return content[images], _names(str(path), content[labels], content.get("class_names"))
    raise DataError(f"{path}: no x and y in it, nor x_train and y_train (it has {', '.join(content) or 'nothing'})")


def _from_function(source: str, module: str, name: str) -> tuple[Any, list[str]]:
    """What a site's own function returns: images, labels and, if labels are indices into a list of names, that list."""
    function = getattr(load_plugin(module), name, None)
    if not callable(function):
        raise DataError(f"{source}: {module} has no function {name}")
    try:
        returned = function()
    except Exception as error:  # whatever the site's own code raises
        raise DataError(f"{source}: failed with {in_one_line(error)}") from None
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise DataError(
            f"{source}: returned {type(returned).__name__}; return (images, labels) or (images, labels, class_names)"
        )
    return returned[0], _names(source, np.asarray(returned[1]), np.asarray(returned[2]) if len(returned) == 3 else None)


def _names(where: str, labels: Any, class_names: Any) -> list[str]:
    """The class name of every image."""
    if labels.ndim != 1:
        raise DataError(f"{where}: labels have shape {labels.shape}; give one per image")
    if class_names is None or labels.dtype.kind in "US":
        return [str(label) for label in labels.tolist()]
    names = [str(name) for name in class_names]
    if labels.dtype.kind not in "iu" or (labels.size and not 0 <= int(labels.min()) <= int(labels.max()) < len(names)):
        raise DataError(f"{where}: labels must be numbers from 0 to {len(names) - 1}, indices into class_names")
    return [names[label] for label in labels.tolist()]
