"""Published data sets by name.

Official files are looked for in `local.data_path` and in the cache, then downloaded and checked against their published
MD5; an .npz of the same name (`cifar10.npz`) serves as well. What was read is verified (counts, shapes, labels).
"""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pooch

from oneround.data import files
from oneround.data.datasets import Loader, Size, dataset_from_files, datasets, from_npz
from oneround.data.images import Dataset, dataset_from_arrays
from oneround.errors import DataError


@dataclass(frozen=True)
class PublishedFile:
    """A file of a published data set: its address and its MD5."""

    url: str
    md5: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


class Published(Loader):
    """A published data set whose numbers of images are known."""

    official: ClassVar[tuple[PublishedFile, ...]] = ()
    counts: ClassVar[tuple[int, int]] = (0, 0)
    """Training and test images."""
    names: ClassVar[tuple[str, ...]] = ()
    """Of the classes."""

    def load(self, path: Path | None) -> Dataset:
        if path is not None and not path.exists():
            raise DataError(f"{self.kind}: no folder or file at local.data_path = {path}")
        packed = path if path and path.suffix == ".npz" else (path or cache()) / f"{self.kind}.npz"
        data = from_npz(packed, self.kind, self.names, self.mirror) if packed.is_file() else self.read(path)
        counts = (len(data.train), len(data.test))
        if counts != self.counts:
            raise DataError(
                f"{self.kind}: {counts[0]} training and {counts[1]} test images, expected {self.counts[0]} and {self.counts[1]}"
            )
        return data

    def read(self, folder: Path | None) -> Dataset:
        """Read the official files."""
        raise NotImplementedError

    def fetch(self, number: int, folder: Path | None) -> Path:
        """An official file, from `folder`, from the cache, or downloaded into it."""
        source = self.official[number]
        for directory in (folder, cache()):
            if directory and (directory / source.file).is_file():
                return directory / source.file
        target = folder or cache()
        try:
            target.mkdir(parents=True, exist_ok=True)
            downloaded = pooch.retrieve(
                source.url,
                known_hash=f"md5:{source.md5}",
                fname=source.file,
                path=target,
                downloader=pooch.HTTPDownloader(progressbar=True, timeout=30),
            )
        except (OSError, ValueError) as error:
            reason = "checksum differs" if isinstance(error, ValueError) else type(error).__name__
            raise DataError(
                f"{self.kind}: cannot download {source.url} ({reason}); "
                f"put {source.file} or {self.kind}.npz into {target}, or name their folder with --data-dir"
            ) from None
        return Path(downloaded)

    def build(self, x_train: Any, y_train: Any, x_test: Any, y_test: Any) -> Dataset:
        return dataset_from_arrays(
            self.kind, x_train, y_train, x_test, y_test, class_names=self.names or None, mirror=self.mirror
        )


def cache() -> Path:
    """Where downloads go: $ONEROUND_DATA, or the user's cache folder."""
    return Path(os.environ.get("ONEROUND_DATA") or pooch.os_cache("oneround"))


class _Idx(Published):
    """The MNIST file format."""

    counts = (60_000, 10_000)

    def read(self, folder: Path | None) -> Dataset:
        arrays = []
        for number, source in enumerate(self.official):
            plain = folder / source.file.removesuffix(".gz") if folder else None
            path = plain if plain and plain.is_file() else self.fetch(number, folder)
            arrays.append(files.read_idx(path, 3 if "images" in source.file else 1))
        return self.build(*arrays)


def _idx_files(base: str, *md5: str) -> tuple[PublishedFile, ...]:
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return tuple(PublishedFile(base + name, checksum) for name, checksum in zip(names, md5, strict=True))


@datasets.register("mnist")
class Mnist(_Idx):
    """Handwritten digits, 28×28 grey."""

    mirror = False
    official = _idx_files(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    )
    names = tuple("0123456789")


@datasets.register("fashion-mnist")
class FashionMnist(_Idx):
    """Articles of clothing, 28×28 grey."""

    official = _idx_files(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    )
    names = (
        "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    )  # fmt: skip


class _Cifar(Published):
    """The CIFAR binary format, from the archive or from its unpacked folder."""

    counts = (50_000, 10_000)
    folder_name: ClassVar[str]
    label_bytes: ClassVar[int]
    train_files: ClassVar[tuple[str, ...]]
    test_file: ClassVar[str]

    def read(self, folder: Path | None) -> Dataset:
        file_names = [*self.train_files, self.test_file]
        for directory in (folder, folder / self.folder_name if folder else None):
            if directory and all((directory / name).is_file() for name in file_names):
                raw, where = {name: files.read_bytes(directory / name) for name in file_names}, directory
                break
        else:
            where = self.fetch(0, folder)
            raw = files.tar_members(where, file_names)
        parts = {name: files.read_cifar(raw[name], f"{where}/{name}", self.label_bytes) for name in file_names}
        train = [np.concatenate(arrays) for arrays in zip(*(parts[name] for name in self.train_files), strict=True)]
        return self.build(train[0], train[1], *parts[self.test_file])


@datasets.register("cifar10")
class Cifar10(_Cifar):
    """Ten kinds of things, 32×32 colour."""

    official = (
        PublishedFile("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    )
    names = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    folder_name = "cifar-10-batches-bin"
    label_bytes = 1
    train_files = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
    test_file = "test_batch.bin"


@datasets.register("cifar100")
class Cifar100(_Cifar):
    """A hundred kinds of things, 32×32 colour (fine labels)."""

    official = (
        PublishedFile("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
    )
    names = tuple(str(label) for label in range(100))
    folder_name = "cifar-100-binary"
    label_bytes = 2
    train_files = ("train.bin",)
    test_file = "test.bin"


@datasets.register("svhn")
class Svhn(Published):
    """House numbers from the street, 32×32 colour (cropped digits)."""

    mirror = False
    counts = (73_257, 26_032)
    official = (
        PublishedFile("http://ufldl.stanford.edu/housenumbers/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        PublishedFile("http://ufldl.stanford.edu/housenumbers/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    )
    names = tuple("0123456789")

    def read(self, folder: Path | None) -> Dataset:
        return self.build(*files.read_svhn(self.fetch(0, folder)), *files.read_svhn(self.fetch(1, folder)))


@datasets.register("tiny-imagenet")
class TinyImageNet(Published):
    """200 classes of ImageNet at 64×64; its validation images are the test set."""

    counts = (100_000, 10_000)
    official = (PublishedFile("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),)
    size: Size = 64

    def read(self, folder: Path | None) -> Dataset:
        unpacked = folder / "tiny-imagenet-200" if folder else None
        where = unpacked if unpacked and unpacked.is_dir() else self.fetch(0, folder)
        openers = {name.removeprefix("tiny-imagenet-200/"): opener for name, opener in files.tree(where).items()}
        if "val/val_annotations.txt" not in openers:
            raise DataError(f"{where}: no val/val_annotations.txt in it")
        rows = [row.split("\t") for row in openers["val/val_annotations.txt"]().decode().splitlines() if row]
        images = [name for name in openers if name.startswith("train/") and files.is_image(name)]
        labelled = {
            "train": [(name, name.split("/")[1]) for name in images],
            "test": [(f"val/images/{row[0]}", row[1]) for row in rows],
        }
        return dataset_from_files(self, self.kind, str(where), openers, labelled, self.size)


GTSRB = "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370/"


@datasets.register("gtsrb")
class Gtsrb(Published):
    """43 German traffic signs, scaled to `size` pixels."""

    mirror = False
    counts = (26_640, 12_630)
    official = (
        PublishedFile(GTSRB + "GTSRB-Training_fixed.zip", "513f3c79a4c5141765e10e952eaa2478"),
        PublishedFile(GTSRB + "GTSRB_Final_Test_Images.zip", "c7e4e6327067d32654124b0fe9e82185"),
        PublishedFile(GTSRB + "GTSRB_Final_Test_GT.zip", "fe31e9c9270bbcd7b84b7f21a9d9d9e5"),
    )
    size: Size = 32

    def read(self, folder: Path | None) -> Dataset:
        train_zip, test_zip, truth_zip = (self.fetch(number, folder) for number in range(3))
        openers = {**files.tree(train_zip), **files.tree(test_zip), **files.tree(truth_zip)}
        truth = next((name for name in openers if name.endswith("GT-final_test.csv")), None)
        if truth is None:
            raise DataError(f"{truth_zip}: no GT-final_test.csv in it")
        rows = csv.DictReader(io.StringIO(openers[truth]().decode()), delimiter=";")
        label_of = {row["Filename"].strip(): f"{int(row['ClassId']):05d}" for row in rows}
        images = {name: Path(name) for name in openers if files.is_image(name)}
        labelled = {
            "train": [(name, path.parent.name) for name, path in images.items() if "Training" in path.parts],
            "test": [
                (name, label_of[path.name])
                for name, path in images.items()
                if "Final_Test" in path.parts and path.name in label_of
            ],
        }
        return dataset_from_files(self, self.kind, str(train_zip.parent), openers, labelled, self.size)
