"""A student copies answers; teachers are calibrated; images are made up."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from conftest import small_recipe
from oneround.data import Dataset
from oneround.data.augment import MEAN, STD
from oneround.errors import RecipeError
from oneround.training.distillation import calibrated, inversions, noise_images, with_mixes
from oneround.training.objective import terms
from random_batches import random_batch


def test_calibration_weighs_every_class_alike(digits: Dataset) -> None:
    """A teacher tilted towards one class is put upright, and labels of a rare class count as much as those of a common one."""
    by_class = [torch.nonzero(digits.train.labels == label)[:90, 0] for label in range(10)]
    skewed = digits.train.take(torch.cat([by_class[0][:6], *by_class[1:]]))
    device, ridge = torch.device("cpu"), torch.eye(64) * 20
    x = ((digits.train.pixels.float() / 255 - MEAN) / STD).flatten(1)
    solved = torch.linalg.solve(x.T @ x + ridge, x.T @ F.one_hot(digits.train.labels, 10).float())
    tilt = torch.zeros(10).index_fill(0, torch.tensor([3]), 2.0)

    def tilted(images: torch.Tensor) -> torch.Tensor:
        return 10 * images.flatten(1) @ solved + 10 * tilt

    upright = calibrated(tilted, skewed, 10, device)
    seen = (digits.test.pixels.float() / 255 - MEAN) / STD
    before, after = ((teacher(seen).argmax(1) == digits.test.labels) for teacher in (tilted, upright))
    assert before.float().mean() < 0.3 and after.float().mean() > 0.75
    rare = digits.test.labels == 0
    assert after[rare].float().mean() > 0.75


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_is_the_divergence_from_the_teacher(temperature: float) -> None:
    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    batch = random_batch(12, 4, 1, dtype=torch.float64, teacher_logits=logits)
    p, q = (logits / temperature).softmax(1), (batch.logits / temperature).softmax(1)
    expected = temperature**2 * (p * (p.log() - q.log())).sum() / 12
    term = terms.parse({"kind": "distillation", "temperature": temperature})
    assert float(term.loss(batch)) == pytest.approx(float(expected))
    same = random_batch(12, 4, 1, dtype=torch.float64, teacher_logits=batch.logits)
    assert float(term.loss(same)) == pytest.approx(0, abs=1e-12)


def test_clients_have_no_teacher_to_copy() -> None:
    with pytest.raises(RecipeError, match=r"objective.terms.distillation: copies a teacher, and clients have none"):
        small_recipe("fafi", objective__terms__distillation={})


def test_noise_images_are_smooth_and_follow_their_seed() -> None:
    made = noise_images((3, 16, 16), 20, 1)
    assert made.pixels.shape == (20, 3, 16, 16) and made.pixels.dtype == torch.uint8 and len(made) == 20
    assert torch.equal(made.pixels, noise_images((3, 16, 16), 20, 1).pixels)
    assert not torch.equal(made.pixels, noise_images((3, 16, 16), 20, 2).pixels)
    shown = made.pixels.double()
    near, far = ((shown - shown.roll(by, 3)).abs().mean() for by in (1, 8))
    assert near < 0.8 * far, "neighbours are alike"


def test_mixes_come_after_the_images_and_lie_between_two_of_them(digits: Dataset) -> None:
    few = digits.train.take(torch.arange(3))
    mixed = with_mixes(few, 40, 1)
    assert len(mixed) == 43 and torch.equal(mixed.pixels[:3], few.pixels) and torch.equal(mixed.labels[:3], few.labels)
    low, high = few.pixels.amin(0), few.pixels.amax(0)
    assert ((mixed.pixels >= low) & (mixed.pixels <= high)).all() and len(mixed.pixels.unique(dim=0)) > 20
    assert len(with_mixes(few, 0, 1)) == 3


def test_inversions_of_a_linear_teacher_point_along_its_weights() -> None:
    weights = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))

    def teacher(images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ weights.T

    made = inversions(teacher, (1, 8, 8), 4, 24, 1, torch.device("cpu"))
    assert made.labels.tolist() == [0, 1, 2, 3] * 6
    answers = teacher((made.pixels.float() / 255 - MEAN) / STD).argmax(1)
    assert (answers == made.labels).float().mean() >= 0.5, "half of them are not mixed with another"
