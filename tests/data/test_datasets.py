"""Data sets: small files of the real formats, written here, read by the real readers; damage is named."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from oneround.data import Dataset, dataset_from_arrays, datasets, load_dataset, official
from oneround.errors import DataError

random = np.random.RandomState(0)


def load(kind: str, path: Path | None = None, **options: object) -> Dataset:
    return load_dataset(datasets.parse({"kind": kind, **options}), path)


def pictures(n: int, size: int = 32, channels: int = 3) -> np.ndarray:
    return random.randint(0, 256, (n, size, size, channels)).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


# --- digits ----------------------------------------------------------------------------------------------------------


def test_digits_are_all_there_and_split(digits: Dataset) -> None:
    assert (len(digits.train), len(digits.test), digits.shape, digits.classes) == (1442, 355, (1, 8, 8), 10)
    assert int(digits.train.pixels.max()) == 255
    seen = {tuple(row.flatten().tolist()) for row in digits.train.pixels}
    overlap = sum(tuple(row.flatten().tolist()) in seen for row in digits.test.pixels)
    assert overlap == 0
    assert digits.test.class_counts(10).min() >= 34
    assert not digits.mirror


def test_digits_are_those_of_scikit_learn(digits: Dataset) -> None:
    """Which are read without importing it."""
    from sklearn.datasets import load_digits

    told = load_digits()
    pixels = np.round(told.images * (255 / 16))
    for label in range(10):
        kept, held = (part.pixels[part.labels == label, 0].numpy() for part in (digits.train, digits.test))
        whole = pixels[told.target == label]
        assert np.array_equal(held, whole[4::5]) and np.array_equal(kept, np.delete(whole, np.s_[4::5], axis=0))


# --- CIFAR -----------------------------------------------------------------------------------------------------------


def cifar_files(label_bytes: int, train: list[str], test: str) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    rows, images, labels = {}, [], []
    for name in [*train, test]:
        x, y = pictures(4).transpose(0, 3, 1, 2), random.randint(0, 10, 4).astype(np.uint8)
        coarse = np.full((4, label_bytes - 1), 99, np.uint8)
        rows[name] = np.concatenate([coarse, y[:, None], x.reshape(4, -1)], 1).tobytes()
        images.append(x)
        labels.append(y)
    return rows, np.concatenate(images), np.concatenate(labels)


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
@pytest.mark.parametrize("packed", [True, False])
def test_cifar_from_archive_and_from_folder(
    kind: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = datasets.kinds[kind]
    rows, images, labels = cifar_files(loader.label_bytes, list(loader.train_files), loader.test_file)
    monkeypatch.setattr(loader, "counts", (len(images) - 4, 4))
    if packed:
        with tarfile.open(tmp_path / loader.official[0].file, "w:gz") as archive:
            for name, raw in rows.items():
                info = tarfile.TarInfo(f"{loader.folder_name}/{name}")
                info.size = len(raw)
                archive.addfile(info, io.BytesIO(raw))
    else:
        (tmp_path / loader.folder_name).mkdir()
        for name, raw in rows.items():
            (tmp_path / loader.folder_name / name).write_bytes(raw)
    data = load(kind, tmp_path)
    assert np.array_equal(torch.cat([data.train.pixels, data.test.pixels]).numpy(), images)
    assert torch.cat([data.train.labels, data.test.labels]).tolist() == labels.tolist()
    assert data.classes == (10 if kind == "cifar10" else 100)


def test_a_truncated_cifar_file_is_named(tmp_path: Path) -> None:
    loader = datasets.kinds["cifar10"]
    rows, *_ = cifar_files(1, list(loader.train_files), loader.test_file)
    for name, raw in rows.items():
        (tmp_path / name).write_bytes(raw[:-10] if name == "data_batch_3.bin" else raw)
    with pytest.raises(DataError, match=r"data_batch_3\.bin: .* truncated"):
        load("cifar10", tmp_path)


def test_too_few_images_are_noticed(tmp_path: Path) -> None:
    loader = datasets.kinds["cifar10"]
    rows, *_ = cifar_files(1, list(loader.train_files), loader.test_file)
    for name, raw in rows.items():
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match="20 training and 4 test images, expected 50000 and 10000"):
        load("cifar10", tmp_path)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(b"not a tar"))
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz"):
        load("cifar10", tmp_path)


# --- MNIST -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_plain_and_gzipped(kind: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.kinds[kind], "counts", (6, 3))
    content = {"train-images-idx3": pictures(6, 28, 1)[..., 0], "train-labels-idx1": np.arange(6)}
    content |= {"t10k-images-idx3": pictures(3, 28, 1)[..., 0], "t10k-labels-idx1": np.arange(3)}
    for name, array in content.items():
        raw = idx(array)
        (tmp_path / f"{name}-ubyte{suffix}").write_bytes(gzip.compress(raw) if suffix else raw)
    data = load(kind, tmp_path)
    assert np.array_equal(data.train.pixels[:, 0].numpy(), content["train-images-idx3"])
    assert data.test.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not an idx"),
        (b"\x80\x04", "not an idx"),
        (idx(np.zeros((2, 28, 28)))[:-5], "promises"),
        (gzip.compress(b"x" * 50)[:-9], "cannot be read"),
    ],
    ids=["empty", "pickle", "short", "torn gzip"],
)
def test_damaged_idx_files_are_named(raw: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=words) as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)


# --- SVHN ------------------------------------------------------------------------------------------------------------


def test_svhn_mat_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.kinds["svhn"], "counts", (5, 2))
    train, test = pictures(5), pictures(2)
    savemat(
        tmp_path / "train_32x32.mat", {"X": train.transpose(1, 2, 3, 0), "y": np.array([[1], [2], [10], [9], [10]])}
    )
    savemat(tmp_path / "test_32x32.mat", {"X": test.transpose(1, 2, 3, 0), "y": np.array([[10], [3]])})
    data = load("svhn", tmp_path)
    assert np.array_equal(data.train.pixels.numpy(), train.transpose(0, 3, 1, 2))
    assert data.train.labels.tolist() == [1, 2, 0, 9, 0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"X": pictures(3).transpose(1, 2, 3, 0), "y": np.array([[0], [2], [3]])},
            "labels run from 0 to 3, expected 1 to 10",
        ),
        (
            {"X": pictures(3, 28).transpose(1, 2, 3, 0), "y": np.array([[1], [2], [3]])},
            r"expected uint8 \(32, 32, 3, n\)",
        ),
        ({"Z": np.zeros(3)}, "not a readable SVHN"),
    ],
)
def test_a_wrong_svhn_file_is_named(content: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    savemat(tmp_path / "train_32x32.mat", content)
    with pytest.raises(DataError, match=words) as caught:
        load("svhn", tmp_path)
    assert "train_32x32.mat" in str(caught.value)


def test_a_truncated_svhn_file_is_named(tmp_path: Path) -> None:
    savemat(tmp_path / "train_32x32.mat", {"X": pictures(9).transpose(1, 2, 3, 0), "y": np.ones((9, 1))})
    whole = (tmp_path / "train_32x32.mat").read_bytes()
    (tmp_path / "train_32x32.mat").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"train_32x32\.mat: not a readable"):
        load("svhn", tmp_path)


# --- image folders ---------------------------------------------------------------------------------------------------


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def test_an_image_folder_with_train_and_test(tmp_path: Path) -> None:
    for part, n in (("train", 3), ("test", 2)):
        for name in ("cat", "dog"):
            for number in range(n):
                save(tmp_path / part / name / f"{number}.png", pictures(1, 40)[0])
    (tmp_path / "train" / "cat" / ".hidden.png").write_bytes(b"no image")
    data = load("images", tmp_path, size=16)
    assert (len(data.train), len(data.test), data.shape, data.class_names) == (6, 4, (3, 16, 16), ("cat", "dog"))
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_an_image_folder_without_split_holds_some_out(tmp_path: Path) -> None:
    for name, n in (("a", 10), ("b", 5)):
        for number in range(n):
            save(tmp_path / name / f"{number:02d}.png", np.full((8, 8), 10 * number + (name == "b"), np.uint8))
    data = load("images", tmp_path, size=8, grey=True)
    assert (len(data.train), len(data.test), data.shape) == (12, 3, (1, 8, 8))
    values = {int(pixel) for pixel in torch.cat([data.train.pixels, data.test.pixels])[:, 0, 0, 0]}
    assert values == {10 * n for n in range(10)} | {10 * n + 1 for n in range(5)}
    assert load("images", tmp_path, size=8, grey=True).fingerprint == data.fingerprint


def test_what_is_wrong_with_an_image_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no image in it"):
        load("images", tmp_path)
    save(tmp_path / "train" / "cat" / "1.png", pictures(1)[0])
    save(tmp_path / "test" / "dog" / "1.png", pictures(1)[0])
    with pytest.raises(DataError, match="class 'dog' has no training image"):
        load("images", tmp_path)
    (tmp_path / "test" / "dog" / "1.png").write_bytes(b"not a picture")
    save(tmp_path / "train" / "dog" / "1.png", pictures(1)[0])
    with pytest.raises(DataError, match=r"test/dog/1\.png: not a readable image"):
        load("images", tmp_path)
    with pytest.raises(DataError, match="no folder"):
        load("images", tmp_path / "nowhere")


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
@pytest.mark.parametrize("grey", [True, False])
def test_grey_of_16_bits_keeps_its_range(suffix: str, grey: bool, tmp_path: Path) -> None:
    """Black, middle grey and white; cut off at 255 all but black would be white."""
    levels = np.repeat(np.array([0, 257 * 100, 65535], np.uint16), 22)[:64].reshape(8, 8)
    for name in ("a", "b"):
        for part in ("train", "test"):
            save(tmp_path / part / name / f"1.{suffix}", levels)
    pixels = load("images", tmp_path, size=8, grey=grey).train.pixels
    wanted = torch.from_numpy((levels // 257).astype(np.uint8))
    assert all(torch.equal(plane, wanted) for plane in pixels.flatten(0, 1))


@pytest.mark.parametrize(
    ("dtype", "words"), [(np.int32, "32-bit whole numbers"), (np.float32, "floating-point numbers")]
)
def test_an_image_whose_white_is_unknown_is_refused(dtype: type, words: str, tmp_path: Path) -> None:
    for part in ("train", "test"):
        save(tmp_path / part / "a" / "1.tif", np.full((8, 8), 300, dtype))
    with pytest.raises(DataError, match=rf"a/1\.tif: not a readable image \(its pixels are {words}.*8 or 16 bits"):
        load("images", tmp_path)


def test_an_image_too_large_to_unpack_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for part in ("train", "test"):
        save(tmp_path / part / "a" / "1.png", pictures(1, 20)[0])
    with pytest.raises(DataError, match=r"a/1\.png: more than 200 pixels, refused; scale it down"):
        load("images", tmp_path)


def test_a_corrupt_image_is_named_without_python_words(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(2):
            save(tmp_path / name / f"{number}.png", pictures(1)[0])
    (tmp_path / "a" / "0.png").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"a/0\.png: not a readable image \(no image format that is known\)$"):
        load("images", tmp_path, held_out=0.5)


def test_too_few_images_to_hold_some_out_is_said(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name / "1.png", pictures(1)[0])
    with pytest.raises(DataError, match=r"data\.held_out = 0\.2 of each class leaves no image to test on; add images"):
        load("images", tmp_path)


@pytest.mark.parametrize("packed", [True, False])
def test_tiny_imagenet(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.kinds["tiny-imagenet"], "counts", (4, 2))
    root = tmp_path / "tiny-imagenet-200"
    for name in ("n01", "n02"):
        for number in range(2):
            save(root / "train" / name / "images" / f"{name}_{number}.JPEG", pictures(1, 64)[0])
    for number in range(2):
        save(root / "val" / "images" / f"val_{number}.JPEG", pictures(1, 64)[0])
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    if packed:
        with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
            for file in root.rglob("*"):
                archive.write(file, file.relative_to(tmp_path))
        for file in sorted(root.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        root.rmdir()
    data = load("tiny-imagenet", tmp_path)
    assert (data.shape, data.class_names, data.test.labels.tolist()) == ((3, 64, 64), ("n01", "n02"), [1, 0])


def test_gtsrb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.kinds["gtsrb"], "counts", (4, 2))

    def picture() -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(pictures(1, 37)[0]).save(buffer, "PPM")
        return buffer.getvalue()

    with zipfile.ZipFile(tmp_path / "GTSRB-Training_fixed.zip", "w") as archive:
        for label in range(2):
            for number in range(2):
                archive.writestr(f"GTSRB/Training/{label:05d}/{number:05d}.ppm", picture())
            archive.writestr(f"GTSRB/Training/{label:05d}/GT-{label:05d}.csv", "Filename;…")
    with zipfile.ZipFile(tmp_path / "GTSRB_Final_Test_Images.zip", "w") as archive:
        for number in range(2):
            archive.writestr(f"GTSRB/Final_Test/Images/{number:05d}.ppm", picture())
    with zipfile.ZipFile(tmp_path / "GTSRB_Final_Test_GT.zip", "w") as archive:
        archive.writestr("GT-final_test.csv", "Filename;Width;ClassId\n00000.ppm;37;1\n00001.ppm;37;0\n")
    data = load("gtsrb", tmp_path)
    assert (data.shape, data.train.labels.tolist(), data.test.labels.tolist()) == ((3, 32, 32), [0, 0, 1, 1], [1, 0])


# --- .npz and arrays -------------------------------------------------------------------------------------------------


def arrays() -> dict[str, np.ndarray]:
    return {
        "x_train": pictures(6),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": pictures(3),
        "y_test": np.arange(3),
    }


def test_npz_with_names_and_groups(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "mine.npz",
        **arrays(),
        class_names=np.array(["a", "b", "c"]),
        group_train=np.array([7, 7, 9, 9, 7, 9]),
    )
    data = load("npz", tmp_path / "mine.npz")
    assert (data.name, data.class_names) == ("mine", ("a", "b", "c"))
    assert data.groups is not None and data.groups.tolist() == [0, 0, 1, 1, 0, 1]


def test_a_named_set_as_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.kinds["cifar10"], "counts", (6, 3))
    np.savez(tmp_path / "cifar10.npz", **arrays())
    assert load("cifar10", tmp_path).class_names[0] == "airplane"
    assert load("cifar10", tmp_path / "cifar10.npz").classes == 10


BROKEN = {
    "no y_test": ({"y_test": None}, "no y_test"),
    "labels short": ({"y_train": np.arange(5)}, "6 images but 5 labels"),
    "label out of range": ({"y_test": np.array([0, 1, -1])}, "labels run from -1"),
    "floats beyond 1": ({"x_train": np.full((6, 32, 32, 3), 1.5)}, "outside 0…1"),
    "shapes differ": ({"x_test": pictures(3, 28)}, r"\(3, 32, 32\) but test images \(3, 28, 28\)"),
    "two channels": ({"x_train": pictures(6, 32, 2), "x_test": pictures(3, 32, 2)}, "channels"),
    "too large": ({"x_train": pictures(6, 96), "x_test": pictures(3, 96)}, "8 to 64 pixels"),
    "one class": ({"y_train": np.zeros(6, int), "y_test": np.zeros(3, int)}, "at least 2"),
    "empty": ({"x_test": pictures(0), "y_test": np.zeros(0, int)}, "x_test is empty"),
    "label floats": ({"y_train": np.linspace(0, 1, 6)}, "whole number per image"),
    "groups short": ({"group_train": np.arange(3)}, "3 group ids for 6"),
    "groups missing": ({"group_train": np.array([0, 1, np.nan, 1, np.nan, 0])}, "group_train is nan for 2 of 6"),
    "groups without date": ({"group_train": np.array(["NaT"] * 6, "datetime64[D]")}, "group_train is NaT for 6 of 6"),
    "one name": ({"class_names": np.array("cat")}, r"class_names has shape \(\); give a list of names"),
    "huge label": ({"y_train": np.array([0, 1, 2, 0, 1, 10**9])}, "1000000001 classes, more than the 6 training"),
    "beyond int64": ({"y_train": np.array([0, 1, 2, 0, 1, 2**64 - 1], np.uint64)}, "label of 18446744073709551615"),
    "labels from 1": (
        {"y_train": np.array([1, 2, 3, 1, 2, 3]), "y_test": np.array([1, 2, 3])},
        "no training image has the label 0",
    ),
    "labels with gaps": (
        {"y_train": np.array([0, 1, 4, 0, 1, 4]), "y_test": np.array([0, 1, 4])},
        "no training image has the label 2, and labels go up to 4",
    ),
    "tested, never trained": ({"y_test": np.array([0, 1, 3])}, "no training image has the label 3"),
    "objects": ({"class_names": np.array(["a", None, {}], object)}, "not a readable .npz"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_an_npz_is_said(case: str, tmp_path: Path) -> None:
    changes, words = BROKEN[case]
    content = {key: value for key, value in {**arrays(), **changes}.items() if value is not None}
    np.savez(tmp_path / "mine.npz", **content)
    with pytest.raises(DataError, match=words):
        load("npz", tmp_path / "mine.npz")


def test_what_is_no_npz_is_said(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", pictures(3))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    with pytest.raises(DataError, match=r"one\.npz: not a readable \.npz file \(it is one array"):
        load("npz", tmp_path / "one.npz")
    with pytest.raises(DataError, match=r"is a folder; name the file itself, --data .*FILE\.npz without --data-dir"):
        load("npz", tmp_path)


def test_names_allow_more_classes_than_images() -> None:
    x = pictures(2)
    with pytest.raises(DataError, match="more than the 2 training images"):
        dataset_from_arrays("mine", x, [0, 2], x, [0, 1])
    assert dataset_from_arrays("mine", x, [0, 2], x, [0, 1], class_names=("a", "b", "c")).classes == 3


def test_a_truncated_npz_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **arrays())
    whole = (tmp_path / "mine.npz").read_bytes()
    for cut in (10, len(whole) // 2, len(whole) - 30):
        (tmp_path / "mine.npz").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"mine\.npz"):
            load("npz", tmp_path / "mine.npz")


def test_arrays_from_python_in_any_layout() -> None:
    x = pictures(4)
    last, first = (
        dataset_from_arrays("mine", form, [0, 1, 0, 1], form, [0, 1, 0, 1])
        for form in (x, torch.from_numpy(x.transpose(0, 3, 1, 2)))
    )
    floats = dataset_from_arrays("mine", x / 255.0, [0, 1, 0, 1], x, [0, 1, 0, 1])
    assert last.fingerprint == first.fingerprint == floats.fingerprint


# --- downloads -------------------------------------------------------------------------------------------------------


@pytest.fixture()
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A real web server on loopback and the folder it serves."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_address[1]}/", folder
        web.shutdown()


def serve_svhn(folder: Path, base: str, monkeypatch: pytest.MonkeyPatch, *, spoil: bool = False) -> None:
    files = []
    for name, n in (("train_32x32.mat", 5), ("test_32x32.mat", 2)):
        savemat(folder / name, {"X": pictures(n).transpose(1, 2, 3, 0), "y": np.ones((n, 1), np.uint8)})
        md5 = hashlib.md5((folder / name).read_bytes()).hexdigest()
        files.append(official.Official(name, base + name, "0" * 32 if spoil else md5))
    monkeypatch.setattr(datasets.kinds["svhn"], "official", tuple(files))
    monkeypatch.setattr(datasets.kinds["svhn"], "counts", (5, 2))


def test_a_download_is_checked_and_kept(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, folder = server
    serve_svhn(folder, base, monkeypatch)
    monkeypatch.setenv("ONEROUND_DATA", str(tmp_path / "cache"))
    assert len(load("svhn").train) == 5
    for file in folder.iterdir():
        file.unlink()
    assert len(load("svhn").train) == 5


def test_a_download_with_another_checksum_is_refused(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, folder = server
    serve_svhn(folder, base, monkeypatch, spoil=True)
    monkeypatch.setenv("ONEROUND_DATA", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"checksum differs.*put train_32x32\.mat or svhn\.npz into"):
        load("svhn")
    assert not list((tmp_path / "cache").glob("*.mat"))


def test_no_network_and_no_file_says_where_to_put_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = official.Official("cifar-10-binary.tar.gz", "http://127.0.0.1:9/cifar-10-binary.tar.gz", "0" * 32)
    monkeypatch.setattr(datasets.kinds["cifar10"], "official", (closed,))
    with pytest.raises(
        DataError,
        match=rf"put cifar-10-binary\.tar\.gz or cifar10\.npz into {tmp_path}, or name their folder with --data-dir",
    ):
        load("cifar10", tmp_path)
    with pytest.raises(DataError, match="no folder or file"):
        load("cifar10", tmp_path / "nowhere")


def test_downloads_go_to_the_users_cache_wherever_one_works(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEROUND_DATA", raising=False)
    assert official.cache().is_absolute() and here not in official.cache().parents
