"""A linear classifier of fixed features: its formula, and answers that are computed once in a session."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oneround.data import Images
from oneround.models.features import Features
from oneround.models.linear import Linear
from oneround.session import ScoringSession

CPU = torch.device("cpu")


class Pixels(Features):
    """The pixels themselves."""

    size = 16

    def __init__(self) -> None:
        super().__init__()
        self.images = 0

    def forward(self, images: Tensor) -> Tensor:
        self.images += len(images)
        return images.flatten(1)


def classifier(mirrored: bool = False, session: ScoringSession | None = None, seed: int = 0) -> Linear:
    random = torch.Generator().manual_seed(seed)
    shapes = {"centre": (16,), "weights": (16, 3), "bias": (3,)}
    solved = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return Linear(Pixels(), {"filters": torch.ones(2)}, (1, 4, 4), solved, mirrored, session)


def images(n: int = 7, seed: int = 1) -> Images:
    random = torch.Generator().manual_seed(seed)
    return Images(torch.randint(0, 256, (n, 1, 4, 4), generator=random, dtype=torch.uint8), torch.zeros(n).long())


def test_scores_are_the_formula_and_mirrored_ones_the_mean_of_both() -> None:
    x = torch.rand(250, 1, 4, 4, generator=torch.Generator().manual_seed(2))  # more than it takes at once
    plain, mirrored = classifier(), classifier(mirrored=True)
    expected = (x.flatten(1) - plain.centre) @ plain.weights + plain.bias
    assert torch.allclose(plain(x), expected, atol=1e-5)
    assert torch.allclose(mirrored(x), (plain(x) + plain(x.flip(3))) / 2, atol=1e-5)


def test_answers_are_computed_once_in_a_session_and_every_time_without_one() -> None:
    for session, times in ((ScoringSession(), 1), (None, 2)):
        model, batch = classifier(session=session), images()
        first, second = (model.predict(batch, CPU, 0.5, 0.5) for _ in range(2))
        assert torch.equal(first, second) and model.features.images == times * len(batch)  # type: ignore[operator]


def test_other_images_another_model_or_another_normalisation_is_another_question() -> None:
    session = ScoringSession()
    model, batch = classifier(session=session), images()
    first = model.predict(batch, CPU, 0.5, 0.5)
    other = classifier(session=session, seed=3)
    for scores in (
        model.predict(images(seed=4), CPU, 0.5, 0.5),
        model.predict(batch, CPU, 0.0, 1.0),
        other.predict(batch, CPU, 0.5, 0.5),
        classifier(mirrored=True, session=session).predict(batch, CPU, 0.5, 0.5),
    ):
        assert not torch.allclose(scores, first)
    same = classifier(session=session)
    assert torch.equal(same.predict(batch, CPU, 0.5, 0.5), first) and same.features.images == 0
    batch.pixels.copy_(255 - batch.pixels)
    assert not torch.allclose(model.predict(batch, CPU, 0.5, 0.5), first), "the same tensor, other images"


def test_what_is_saved_is_what_the_answers_depend_on() -> None:
    (tensors,) = classifier().shards()
    assert tensors.keys() == {"centre", "weights", "bias", "shape", "features.filters"}
    assert tensors["shape"].tolist() == [1, 4, 4] and tensors["weights"] == pytest.approx(classifier().weights)
