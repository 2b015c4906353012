"""Arrays become images, labels and groups; what does not fit together is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from image_files import arrays, load, pictures
from oneround.data import Images, dataset_from_arrays
from oneround.errors import DataError
from oneround.models import Single, encoders, initialise

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
def test_what_is_wrong_with_an_npz_is_reported(case: str, tmp_path: Path) -> None:
    changes, words = BROKEN[case]
    content = {key: value for key, value in {**arrays(), **changes}.items() if value is not None}
    np.savez(tmp_path / "mine.npz", **content)
    with pytest.raises(DataError, match=words):
        load("npz", tmp_path / "mine.npz")


def test_names_allow_more_classes_than_images() -> None:
    x = pictures(2)
    with pytest.raises(DataError, match="more than the 2 training images"):
        dataset_from_arrays("mine", x, [0, 2], x, [0, 1])
    assert dataset_from_arrays("mine", x, [0, 2], x, [0, 1], class_names=("a", "b", "c")).classes == 3


def test_arrays_from_python_in_any_layout() -> None:
    x = pictures(4)
    last, first = (
        dataset_from_arrays("mine", form, [0, 1, 0, 1], form, [0, 1, 0, 1])
        for form in (x, torch.from_numpy(x.transpose(0, 3, 1, 2)))
    )
    floats = dataset_from_arrays("mine", x / 255.0, [0, 1, 0, 1], x, [0, 1, 0, 1])
    assert last.fingerprint == first.fingerprint == floats.fingerprint


@pytest.mark.parametrize(("size", "on_a_cpu"), [(8, 500), (16, 256), (28, 83), (64, 16)])
def test_a_cpu_scores_fewer_large_images_at_a_time(size: int, on_a_cpu: int) -> None:
    images = Images(torch.zeros(600, 1, size, size, dtype=torch.uint8), torch.zeros(600, dtype=torch.int64))
    assert images.scored_at_once(torch.device("cpu")) == on_a_cpu
    assert images.scored_at_once(torch.device("cuda")) == 500


def test_an_image_has_the_same_score_however_many_are_scored_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    images = Images(torch.randint(0, 256, (200, 1, 28, 28), dtype=torch.uint8), torch.zeros(200, dtype=torch.int64))
    network, cpu = Single(initialise(encoders.parse("cnn"), 1, 10, 1)).eval(), torch.device("cpu")
    sizes: list[int] = []
    network.net.encoder.register_forward_hook(lambda module, inputs, outputs: sizes.append(len(outputs)))
    with torch.inference_mode():
        scores = network.predict(images, cpu, 0.5, 0.5)
        monkeypatch.setattr(Images, "scored_at_once", lambda self, device: 200)
        assert torch.equal(network.predict(images, cpu, 0.5, 0.5), scores)
    assert sizes == [83, 83, 34, 200]
