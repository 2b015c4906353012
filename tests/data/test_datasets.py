"""Data sets by kind: digits, image folders, arrays in an .npz file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from image_files import arrays, load, pictures, save
from oneround.data import Dataset
from oneround.errors import DataError


def test_digits_are_all_there_and_split(digits: Dataset) -> None:
    assert (len(digits.train), len(digits.test), digits.shape, digits.classes) == (1442, 355, (1, 8, 8), 10)
    assert int(digits.train.pixels.max()) == 255
    training = {tuple(row.flatten().tolist()) for row in digits.train.pixels}
    overlap = sum(tuple(row.flatten().tolist()) in training for row in digits.test.pixels)
    assert overlap == 0
    assert digits.test.class_counts(10).min() >= 34
    assert not digits.mirror


def test_digits_are_those_of_scikit_learn(digits: Dataset) -> None:
    """Which are read without importing it."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    pixels = np.round(raw.images * (255 / 16))
    for label in range(10):
        kept, tested = (part.pixels[part.labels == label, 0].numpy() for part in (digits.train, digits.test))
        whole = pixels[raw.target == label]
        assert np.array_equal(tested, whole[4::5]) and np.array_equal(kept, np.delete(whole, np.s_[4::5], axis=0))


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


def test_too_few_images_to_hold_some_out_is_reported(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name / "1.png", pictures(1)[0])
    with pytest.raises(DataError, match=r"data\.held_out = 0\.2 of each class leaves no image to test on; add images"):
        load("images", tmp_path)


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
