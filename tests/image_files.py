"""Small image files and arrays of the real formats, and how tests load them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from oneround.data import Dataset, datasets, load_dataset

random = np.random.RandomState(0)


def load(kind: str, path: Path | None = None, **options: object) -> Dataset:
    return load_dataset(datasets.parse({"kind": kind, **options}), path)


def pictures(n: int, size: int = 32, channels: int = 3) -> np.ndarray:
    return random.randint(0, 256, (n, size, size, channels)).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def arrays() -> dict[str, np.ndarray]:
    return {
        "x_train": pictures(6),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": pictures(3),
        "y_test": np.arange(3),
    }
