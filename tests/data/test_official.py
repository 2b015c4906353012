"""Published data sets: small files of the real formats, written here, read by the real readers; downloads from a real web server."""

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

from image_files import arrays, idx, load, pictures, random, save
from oneround.data import datasets, official
from oneround.errors import DataError


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


@pytest.mark.parametrize(
    ("row", "words"),
    [("val_9.JPEG\tn01", r"val/images/val_9\.JPEG is listed but missing"), ("val_0.JPEG\tn03", "class 'n03'")],
)
def test_what_the_annotations_of_tiny_imagenet_must_name(row: str, words: str, tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    save(root / "train" / "n01" / "images" / "n01_0.JPEG", pictures(1, 64)[0])
    save(root / "val" / "images" / "val_0.JPEG", pictures(1, 64)[0])
    (root / "val" / "val_annotations.txt").write_text(row)
    with pytest.raises(DataError, match=words):
        load("tiny-imagenet", tmp_path)


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


def test_a_named_set_as_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.kinds["cifar10"], "counts", (6, 3))
    np.savez(tmp_path / "cifar10.npz", **arrays())
    assert load("cifar10", tmp_path).class_names[0] == "airplane"
    assert load("cifar10", tmp_path / "cifar10.npz").classes == 10


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
        files.append(official.PublishedFile(base + name, "0" * 32 if spoil else md5))
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
    closed = official.PublishedFile("http://127.0.0.1:9/cifar-10-binary.tar.gz", "0" * 32)
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
