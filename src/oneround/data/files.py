"""Readers of data-set file formats. Their errors name the file and what is wrong with it; none unpickles anything."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from oneround.errors import DataError

Array = NDArray[Any]
Opener = Callable[[], bytes]
Labelled = dict[str, list[tuple[str, str]]]
"""Files of each part of the data, `train` and `test`, with their classes."""
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test", "val": "test"}
"""Names of folders above the class folders, in any case, with the part of the data that they contain."""
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".webp", ".tif", ".tiff", ".gif"}


def read_bytes(path: Path) -> bytes:
    """The file's content, gunzipped if it is a .gz."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it and fetch it again") from None


def read_cifar(raw: bytes, where: str, label_bytes: int) -> tuple[Array, Array]:
    """CIFAR binary records → images (n, 3, 32, 32), labels (n,); the last label byte is the fine label."""
    record = label_bytes + 3 * 32 * 32
    if not raw or len(raw) % record:
        raise DataError(
            f"{where}: {len(raw)} bytes is not a whole number of {record}-byte records; the file is truncated"
        )
    rows = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]


def read_idx(path: Path, dimensions: int) -> Array:
    """An MNIST idx file of unsigned bytes, plain or gzipped: images in 3 dimensions, labels in 1."""
    raw = read_bytes(path)
    if raw[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(
            f"{path}: not an idx file of unsigned bytes in {dimensions} dimensions (it starts with {raw[:4].hex()})"
        )
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4)]
    if len(raw) != start + int(np.prod(shape)):
        raise DataError(
            f"{path}: {len(raw)} bytes, but its header promises {start + int(np.prod(shape))} for shape {shape}"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def read_svhn(path: Path) -> tuple[Array, Array]:
    """An SVHN .mat file (cropped digits) → images (n, 32, 32, 3), labels (n,) with the label 10 meaning digit 0."""
    from scipy.io import loadmat

    try:
        content = loadmat(path)
        images, labels = np.asarray(content["X"]), np.asarray(content["y"]).reshape(-1)
    except Exception as error:  # scipy raises many kinds on damaged files
        raise DataError(f"{path}: not a readable SVHN .mat file ({type(error).__name__}: {error})") from None
    if images.ndim != 4 or images.shape[:3] != (32, 32, 3) or images.dtype != np.uint8:
        raise DataError(f"{path}: X is {images.dtype} {images.shape}, expected uint8 (32, 32, 3, n)")
    if labels.min() < 1 or labels.max() > 10:
        raise DataError(f"{path}: labels run from {labels.min()} to {labels.max()}, expected 1 to 10")
    return images.transpose(3, 0, 1, 2), labels.astype(np.int64) % 10


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file."""
    try:
        content = np.load(path, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise ValueError("it is one array, an .npy file; save several with numpy.savez")
        with content:
            return {name: content[name] for name in content.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a readable .npz file ({error})") from None


def tar_members(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Files of a .tar.gz by their base name, without unpacking it."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isfile() and name in names:
                    content = archive.extractfile(member)
                    contents[name] = content.read() if content else b""
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged archive ({error}); delete it and fetch it again") from None
    for name in names:
        if name not in contents:
            raise DataError(f"{path}: no {name} in this archive")
    return contents


def tree(path: Path) -> dict[str, Opener]:
    """Every file below a folder or inside a .zip, by its path with forward slashes."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return {file.relative_to(path).as_posix(): file.read_bytes for file in files}
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path}: damaged archive ({error}); delete it and fetch it again") from None
    names = sorted(name for name in archive.namelist() if not name.endswith("/"))
    return {name: lambda name=name: archive.read(name) for name in names}  # type: ignore[misc]


def is_image(name: str) -> bool:
    """Whether a file name is an image's; hidden files and macOS companions are not."""
    path = Path(name)
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and "__MACOSX" not in path.parts


def labelled_images(path: Path, names: Iterable[str]) -> Labelled:
    """The images among a folder's files, each with its class: SPLIT/CLASS/image.png, or CLASS/image.png, all of it `train`.

    >>> labelled_images(Path("pets"), ["Train/cat/1.png", "val/cat/2.png", "read.me"])
    {'train': [('Train/cat/1.png', 'cat')], 'test': [('val/cat/2.png', 'cat')]}
    """
    parts = {name: name.split("/") for name in names if is_image(name)}
    has_splits = bool(parts) and all(folders[0].lower() in SPLITS and len(folders) > 2 for folders in parts.values())
    depth = 1 if has_splits else 0
    unclassed = next((name for name, folders in parts.items() if len(folders) <= depth + 1), None)
    if unclassed or not parts:
        problem = f"{unclassed} lies outside any class folder" if unclassed else "no image in it"
        raise DataError(
            f"{path}: {problem}; expected train/CLASS/image.png and test/CLASS/image.png, or CLASS/image.png"
        )
    labelled: Labelled = {"train": [], "test": []}
    for name, folders in parts.items():
        labelled[SPLITS[folders[0].lower()] if has_splits else "train"].append((name, folders[depth]))
    return labelled


def decode_images(
    where: str, openers: Mapping[str, Opener], names: Iterable[str], size: tuple[int, int], channels: int
) -> Array:
    """Image files → uint8 (n, height, width, channels), scaled to fit; `size` is (width, height)."""

    def decode(name: str) -> Array:
        return decode_image(f"{where}/{name}", openers[name], size, channels)

    with ThreadPoolExecutor() as pool:
        decoded = list(pool.map(decode, names, chunksize=64))
    return np.stack(decoded) if decoded else np.zeros((0, size[1], size[0], channels), np.uint8)


def decode_image(where: str, opener: Opener, size: tuple[int, int], channels: int) -> Array:
    """An image file → uint8 (height, width, channels), scaled to fit; `size` is (width, height)."""
    try:
        with Image.open(io.BytesIO(opener())) as opened:
            image = _eight_bits(opened).convert("L" if channels == 1 else "RGB")
    except FileNotFoundError:
        raise DataError(f"{where}: no such file") from None
    except UnidentifiedImageError:
        raise DataError(f"{where}: not a readable image (no image format that is known)") from None
    except Image.DecompressionBombError:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise DataError(f"{where}: more than {limit:,} pixels, refused; scale it down first") from None
    except (OSError, SyntaxError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{where}: not a readable image ({error})") from None
    if image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(size[1], size[0], channels)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits scaled to 8 (Pillow would cut it off at 255); grey whose white is not known is refused."""
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if sixteen:
        values = np.asarray(image).astype(np.int64)
        return Image.fromarray(((values + 128) // 257).clip(0, 255).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "32-bit whole numbers" if image.mode == "I" else "floating-point numbers"
        raise ValueError(f"its pixels are {kind}, so its white is unknown; save it with 8 or 16 bits")
    return image
