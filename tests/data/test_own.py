"""A site's own images: three ways to bring them, matched by name, refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from oneround.data import datasets, own_images
from oneround.errors import DataError, RecipeError

NAMES, SHAPE = ("cat", "dog"), (1, 8, 10)
GREY = {"dog": 200, "cat": 50}


def pictures(folder: Path, *classes: str) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(2):
            Image.new("L", (20, 16), GREY.get(name.lower(), 9)).save(folder / name / f"{number}.png")
    return folder


def test_a_folder_by_class_is_scaled_and_matched_by_name(tmp_path: Path) -> None:
    images = own_images(str(pictures(tmp_path / "mine", "dog", "cat")), NAMES, SHAPE, {})
    assert images.pixels.shape == (4, 1, 8, 10) and sorted(images.labels.tolist()) == [0, 0, 1, 1]
    assert all(
        int(pixels.max()) == GREY[NAMES[label]] for pixels, label in zip(images.pixels, images.labels, strict=True)
    )
    renamed = own_images(str(pictures(tmp_path / "other", "Hund", "cat")), NAMES, SHAPE, {"Hund": "dog"})
    assert sorted(renamed.labels.tolist()) == [0, 0, 1, 1]


def test_of_a_folder_with_parts_only_the_training_part_is_taken(tmp_path: Path) -> None:
    pictures(tmp_path / "train", "dog")
    pictures(tmp_path / "test", "cat")
    assert own_images(str(tmp_path), NAMES, SHAPE, {}).labels.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("train", "test"), [("train", "test"), ("training", "testing"), ("Train", "Test"), ("TRAINING", "val")]
)
def test_names_of_parts_are_the_same_for_a_site_as_for_a_run(tmp_path: Path, train: str, test: str) -> None:
    """`oneround federate client --data FOLDER` and `oneround run --data FOLDER` read a folder alike."""
    pictures(tmp_path / train, "dog", "cat")
    pictures(tmp_path / test, "cat")
    assert sorted(own_images(str(tmp_path), NAMES, SHAPE, {}).labels.tolist()) == [0, 0, 1, 1]
    dataset = datasets.parse("images").load(tmp_path)
    assert dataset.class_names == NAMES and sorted(dataset.train.labels.tolist()) == [0, 0, 1, 1]
    assert dataset.test.labels.tolist() == [0, 0]


def test_a_part_name_above_some_images_only_is_a_class(tmp_path: Path) -> None:
    pictures(tmp_path, "Train", "dog")
    assert own_images(str(tmp_path), ("Train", "dog"), SHAPE, {}).labels.tolist() == [0, 0, 1, 1]
    assert datasets.parse({"kind": "images", "held_out": 0.5}).load(tmp_path).class_names == ("Train", "dog")


def test_a_site_without_training_images_says_so(tmp_path: Path) -> None:
    pictures(tmp_path / "test", "dog")
    with pytest.raises(DataError, match=r"no training image in it; expected train/CLASS/image\.png"):
        own_images(str(tmp_path), NAMES, SHAPE, {})


@pytest.mark.parametrize("labels", [np.array(["dog", "cat", "dog"]), np.array([0, 1, 0])], ids=["names", "numbers"])
def test_an_npz_says_names_or_places_in_its_own_list(tmp_path: Path, labels: np.ndarray) -> None:
    x = np.zeros((3, 8, 10), np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=labels, class_names=["dog", "cat"])
    np.savez(tmp_path / "b.npz", x_train=x, y_train=labels, class_names=["dog", "cat"])
    for file in ("a.npz", "b.npz"):
        assert own_images(str(tmp_path / file), NAMES, SHAPE, {}).labels.tolist() == [1, 0, 1]


def test_a_function_of_the_site(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(here))
    (here / "archive_of_ours.py").write_text(
        "import numpy as np\n"
        "def scans(): return np.zeros((2, 8, 10)), ['dog', 'cat']\n"
        "def broken(): raise OSError('archive is offline')\n"
        "def odd(): return 3\n"
    )
    assert own_images("archive_of_ours:scans", NAMES, SHAPE, {}).labels.tolist() == [1, 0]
    for name, words in (
        ("broken", "failed with OSError: archive is offline"),
        ("odd", "returned int"),
        ("no", "no function no"),
    ):
        with pytest.raises(DataError, match=words):
            own_images(f"archive_of_ours:{name}", NAMES, SHAPE, {})
    with pytest.raises(RecipeError, match="no module named 'not_there_at_all'"):
        own_images("not_there_at_all:load", NAMES, SHAPE, {})
    sys.modules.pop("archive_of_ours")


def test_what_is_refused(tmp_path: Path) -> None:
    x = np.zeros((2, 8, 10), np.uint8)
    np.savez(tmp_path / "strange.npz", x=x, y=["dog", "fox"])
    np.savez(tmp_path / "numbers.npz", x=x, y=np.array([0, 5]), class_names=["dog", "cat"])
    np.savez(tmp_path / "size.npz", x=np.zeros((2, 9, 9), np.uint8), y=["dog", "cat"])
    np.savez(tmp_path / "keys.npz", images=x)
    (tmp_path / "empty").mkdir()
    for name, words in {
        "strange.npz": "the recipe does not know 'fox'; it knows 'cat', 'dog'",
        "numbers.npz": "labels must be numbers from 0 to 1",
        "size.npz": r"\(1, 9, 9\); this federation's are \(1, 8, 10\)",
        "keys.npz": "no x and y in it",
        "empty": "no image in it",
        "none": "no such folder",
    }.items():
        with pytest.raises(DataError, match=words) as caught:
            own_images(str(tmp_path / name), NAMES, SHAPE, {})
        assert "\n" not in str(caught.value)
