"""Sums add, subtract and travel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oneround import sums
from oneround.config.load import load
from oneround.config.sections import Sums
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.fusion.ridge import total_sums
from oneround.protocol import Broadcast, Upload
from oneround.server.plan import DealtPlan
from oneround.sums import moments, packed, unpacked
from oneround.sums.moments import Moments, mirror_, square_of, sums_layout, triangle_of
from small_sums import broadcast_of, upload_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def broadcast(digits: Dataset) -> Broadcast:
    return broadcast_of(digits)


@pytest.mark.parametrize(
    ("how", "close"),
    [
        ({}, 1e-6),
        ({"precision": "int16"}, 2e-5),
        ({"precision": "fp16"}, 1e-3),
        ({"precision": "bf16"}, 5e-3),
        ({"rank": 96}, 1e-5),
        ({"rank": 60}, 0.05),
    ],
)
def test_smaller_uploads_stay_close(
    broadcast: Broadcast, digits: Dataset, how: dict[str, object], close: float
) -> None:
    exact = total_sums([upload_of(broadcast, digits, "site", np.arange(400))], broadcast, CPU)
    options = Sums.model_validate({"features": broadcast.recipe.sums.features, **how})  # type: ignore[union-attr]
    again = unpacked(packed(exact, options))
    scale = exact.gram.diagonal().sqrt()
    assert float(((again.gram - exact.gram) / scale / scale[:, None]).abs().max()) < close
    assert torch.allclose(again.gram.diagonal(), exact.gram.diagonal(), rtol=1e-3)
    other = broadcast_of(digits, **{f"sums__{key}": value for key, value in how.items()})
    upload = upload_of(other, digits, "site", np.arange(400))
    assert {name: (tuple(value.shape), value.dtype) for name, value in upload.sums.items()} == other.sums
    assert Upload.unpack(upload.pack(), other, {}).content == upload.content


def test_sums_that_no_memory_holds_are_refused_at_once(digits: Dataset) -> None:
    with pytest.raises(RecipeError, match=r"size = 8000000000: adding and solving take 1\.54e\+12 GB of memory"):
        DealtPlan.of(load("ridge", [("sums.features.size", 8_000_000_000)]), digits)
    with pytest.raises(RecipeError, match=r"take \d+000 or less"):
        sums.check_memory(10**7)


def moments_of(features: torch.Tensor, labels: torch.Tensor) -> Moments:
    targets = torch.nn.functional.one_hot(labels, 3).double()
    return Moments(features.T @ features, features.T @ targets, features.sum(0), targets.sum(0))


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3


def close(one: Moments, other: Moments) -> bool:
    names = ("gram", "cross", "total", "counts")
    return all(torch.allclose(getattr(one, name), getattr(other, name)) for name in names)


def test_sums_of_two_sets_add_and_are_taken_off_again(features: torch.Tensor) -> None:
    labels = torch.arange(20) % 3
    whole, first, last = (moments_of(features[part], labels[part]) for part in (slice(None), slice(8), slice(8, None)))
    assert close(first + last, whole) and close(whole - last, first) and whole.samples == 20
    total = Moments.zero(5, 3)
    for each in (first, last):
        total.include(each)
    assert close(total, whole)


def test_sums_around_a_centre_and_scaled_are_those_of_moved_and_scaled_features(features: torch.Tensor) -> None:
    labels = torch.arange(20) % 3
    centre = torch.arange(5).double()
    assert close(moments_of(features, labels).around(centre), moments_of(features - centre, labels))
    assert close(moments_of(features, labels).scaled(-3), moments_of(features / 8, labels))


def test_a_triangle_is_the_matrix_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gram = torch.randn(7, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gram = gram + gram.T
    triangle = triangle_of(gram, torch.float64)
    assert triangle.shape == (28,) and torch.equal(triangle[:7], gram[0])
    assert torch.equal(square_of(triangle, 7), gram)
    upper = gram.triu()
    monkeypatch.setattr(moments, "BLOCK", 3)
    mirror_(upper)
    assert torch.equal(upper, gram)


@pytest.mark.parametrize("how", [{}, {"precision": "bf16"}, {"rank": 3}, {"secure": True, "class_counts": False}])
def test_the_layout_is_known_before_anything_is_summed(digits: Dataset, how: dict[str, object]) -> None:
    changes = {"reveal__class_counts" if key == "class_counts" else f"sums__{key}": value for key, value in how.items()}
    recipe = broadcast_of(digits, **changes).recipe
    layout = sums_layout(recipe, 96, 10)
    if recipe.secure:
        assert {dtype for _, dtype in layout.values()} == {torch.int64} and layout["check"][0] == (8,)
    else:
        sums = packed(Moments(torch.eye(96).double(), *(torch.ones(s).double() for s in ((96, 10), (96,), (10,)))), recipe.sums)  # type: ignore[arg-type]  # fmt: skip
        assert {name: (tuple(value.shape), value.dtype) for name, value in sums.items()} == layout
