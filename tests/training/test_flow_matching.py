"""The step of a generator: its noise is normal and repeatable, its target is noise minus image, its class is withheld."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from generating import sent
from oneround.config.sections import Generator
from oneround.data import Dataset
from oneround.site import Site
from oneround.training.flow_matching import COLUMNS, FLIP, HIGH, LABEL, TIME, FlowStep, noise, times
from oneround.training.generator import flow_rate


@pytest.fixture(scope="module")
def numbers() -> torch.Tensor:
    return torch.rand(2000, COLUMNS, generator=torch.Generator().manual_seed(1))


def test_noise_is_normal_and_independent_between_pixels_and_images(numbers: torch.Tensor) -> None:
    drawn = noise(numbers, (3, 5, 5)).flatten(1).double().numpy()
    assert drawn.shape == (2000, 75)
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 0.01
    off_diagonal = np.corrcoef(drawn.T)[~np.eye(75, dtype=bool)]
    assert (
        np.abs(off_diagonal).max() < 5 / 2000**0.5
        and abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.01
    )


def test_noise_follows_its_seed_and_nothing_else(numbers: torch.Tensor) -> None:
    few = numbers[:3].clone()
    same, other = few.clone(), few.clone()
    same[:, TIME], other[1, HIGH] = 0.5, 0.25
    assert torch.equal(noise(few, (1, 4, 4)), noise(same, (1, 4, 4)))
    changed = (noise(few, (1, 4, 4)) != noise(other, (1, 4, 4))).flatten(1).all(1)
    assert changed.tolist() == [False, True, False]


def test_times_are_sigmoids_of_normal_numbers(numbers: torch.Tensor) -> None:
    assert stats.kstest(torch.logit(times(numbers).double()).numpy(), "norm").pvalue > 0.01


def step_of(digits: Dataset, **changes: object) -> FlowStep:
    broadcast = sent(digits, **{f"generator__{key}": value for key, value in changes.items()})
    step = FlowStep(broadcast, Site("site"))
    step.bind(broadcast)
    return step


def test_a_network_that_predicts_nothing_loses_what_noise_minus_image_is(digits: Dataset) -> None:
    step, chosen = step_of(digits), digits.train.take(torch.arange(500))
    step(chosen.pixels, chosen.labels, torch.rand(500, COLUMNS, generator=torch.Generator().manual_seed(2)), 0.0)
    expected = 1 + float((chosen.pixels.float() / 127.5 - 1).square().mean())
    assert step.means(1)["loss"] == pytest.approx(expected, rel=0.01)


def test_it_learns_the_velocity_of_a_single_image(digits: Dataset) -> None:
    """For one image c the velocity is (x_t − c)/t: known, so the loss falls far below that of predicting nothing."""
    step = step_of(digits)
    chosen = digits.train.take(torch.zeros(32, dtype=torch.int64))
    random, losses = torch.Generator().manual_seed(3), []
    for _ in range(100):
        step(chosen.pixels, chosen.labels, torch.rand(32, COLUMNS, generator=random), 5e-3)
        losses.append(step.means(1)["loss"])
    assert np.mean(losses[-10:]) < 0.25 * losses[0], losses[::10]
    image = digits.train.pixels[:1].float() / 127.5 - 1
    drawn = torch.randn(8, 1, 8, 8, generator=random)
    with torch.no_grad():
        velocity = step.net((image + drawn) / 2, torch.full((8,), 0.5), torch.zeros(8, dtype=torch.int64))
    assert F.cosine_similarity(velocity.flatten(1), (drawn - image).flatten(1)).min() > 0.8


def test_classes_are_withheld_and_images_mirrored_as_often_as_asked(digits: Dataset) -> None:
    chosen = digits.train.take(torch.arange(64))
    numbers = torch.rand(64, COLUMNS, generator=torch.Generator().manual_seed(4))
    passed: list[torch.Tensor] = []

    def inputs(flip: float) -> torch.Tensor:
        step = step_of(digits, flip=flip, drop_label=0.3)
        net = step.net

        def predict(noisy: torch.Tensor, at: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            passed[:] = [noisy, classes]
            return net(noisy, at, classes)

        step.predict = predict
        step(chosen.pixels, chosen.labels, numbers, 0.0)
        return passed[0]

    plain, mixed, mirrored = inputs(0.0), inputs(0.4), inputs(1.0)
    withheld = numbers[:, LABEL] < 0.3
    assert torch.equal(passed[1], torch.where(withheld, 10, chosen.labels)) and 0 < int(withheld.sum()) < 64
    expected = torch.where((numbers[:, FLIP] < 0.4)[:, None, None, None], mirrored, plain)
    assert torch.equal(mixed, expected) and not torch.equal(plain, mirrored)
    share = times(numbers)[:, None, None, None]
    drawn = noise(numbers, (1, 8, 8))
    torch.testing.assert_close(
        ((plain - share * drawn) / (1 - share)).flip(3), (mirrored - share * drawn) / (1 - share)
    )


def test_the_rate_rises_stays_and_falls() -> None:
    options = Generator(learning_rate=2.0, warm_up=9, fall=0.5, lowest=0.1)
    rates = [flow_rate(options, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9:51] == [2.0] * 42
    assert rates[75] == pytest.approx(2.0 * 0.55) and rates[99] == pytest.approx(2.0 * (0.1 + 0.9 / 50))
    assert flow_rate(replace_fall(options), 99, 100) == 2.0
    assert flow_rate(options, 1, 10) == pytest.approx(2.0 * 2 / 3), "a short training rises over a fifth of its steps"


def replace_fall(options: Generator) -> Generator:
    return options.model_copy(update={"fall": 0.0})
