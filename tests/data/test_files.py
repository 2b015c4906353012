"""File formats: images and arrays are read as they are meant; damage is named."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from image_files import arrays, idx, load, pictures, save
from oneround.errors import DataError


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not an idx"),
        (b"\x80\x04", "not an idx"),
        (idx(np.zeros(6)), "not an idx file of unsigned bytes in 3 dimensions"),
        (idx(np.zeros((2, 28, 28)))[:-5], "promises"),
        (gzip.compress(b"x" * 50)[:-9], "cannot be read"),
    ],
    ids=["empty", "pickle", "labels", "short", "torn gzip"],
)
def test_damaged_idx_files_are_named(raw: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=words) as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)


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


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
@pytest.mark.parametrize("grey", [True, False])
def test_grey_of_16_bits_keeps_its_range(suffix: str, grey: bool, tmp_path: Path) -> None:
    """Black, middle grey and white; cut off at 255 all but black would be white."""
    levels = np.repeat(np.array([0, 257 * 100, 65535], np.uint16), 22)[:64].reshape(8, 8)
    for name in ("a", "b"):
        for part in ("train", "test"):
            save(tmp_path / part / name / f"1.{suffix}", levels)
    pixels = load("images", tmp_path, size=8, grey=grey).train.pixels
    expected = torch.from_numpy((levels // 257).astype(np.uint8))
    assert all(torch.equal(plane, expected) for plane in pixels.flatten(0, 1))


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


def test_what_is_no_npz_is_reported(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", pictures(3))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    with pytest.raises(DataError, match=r"one\.npz: not a readable \.npz file \(it is one array"):
        load("npz", tmp_path / "one.npz")
    with pytest.raises(DataError, match=r"is a folder; name the file itself, --data .*FILE\.npz without --data-dir"):
        load("npz", tmp_path)


def test_a_truncated_npz_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **arrays())
    whole = (tmp_path / "mine.npz").read_bytes()
    for cut in (10, len(whole) // 2, len(whole) - 30):
        (tmp_path / "mine.npz").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"mine\.npz"):
            load("npz", tmp_path / "mine.npz")
