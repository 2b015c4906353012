"""Generators: size, what they depend on, and options that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oneround.config.parts import Part
from oneround.errors import RecipeError
from oneround.models.unet import UNet, generator_from, generators, initial_generator, meta_generator

TINY: dict[str, Any] = {"widths": [8, 16], "blocks": [1, 1], "attention": [1], "head": 8}


def tiny(**options: Any) -> Part:
    return generators.parse(TINY | options)


def size(part: Part, classes: int = 10) -> int:
    return sum(parameter.numel() for parameter in meta_generator(part, (3, 32, 32), classes).parameters())


def test_the_default_has_11_6_million_parameters() -> None:
    assert size(UNet()) == 11_583_171


def test_every_option_changes_the_network() -> None:
    sizes = {size(tiny(**options)) for options in ({}, {"widths": [8, 32]}, {"blocks": [2, 1]}, {"attention": [0, 1]})}
    assert len(sizes) == 4
    one, other = (meta_generator(tiny(head=head), (1, 8, 8), 3).down[1].attention for head in (8, 16))  # type: ignore[index]
    assert (one.heads, other.heads) == (2, 1)


def test_a_fresh_one_predicts_nothing_and_depends_on_its_seed_alone() -> None:
    one, same, other = (initial_generator(tiny(), (1, 8, 8), 3, seed) for seed in (1, 1, 2))
    noisy, times, labels = torch.randn(2, 1, 8, 8), torch.tensor([0.1, 0.9]), torch.tensor([0, 3])
    assert not one(noisy, times, labels).any()
    states = [net.state_dict() for net in (one, same, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["first.weight"], states[2]["first.weight"])


def test_the_velocity_depends_on_pixels_far_away_on_time_and_on_class() -> None:
    weights = {
        name: torch.randn_like(value) / 4
        for name, value in initial_generator(tiny(), (1, 8, 8), 3, 1).state_dict().items()
    }
    net = generator_from(tiny(), (1, 8, 8), 3, weights)
    noisy, times, labels = torch.randn(1, 1, 8, 8), torch.tensor([0.4]), torch.tensor([0])
    velocity, changed = net(noisy, times, labels), noisy.clone()
    changed[..., 7, 7] += 1
    for other in ((changed, times, labels), (noisy, times + 0.01, labels), (noisy, times, labels + 1)):
        assert not torch.allclose(net(*other)[..., 0, 0], velocity[..., 0, 0], atol=1e-5)
    assert net.no_class == 3 and net(noisy, times, torch.tensor([3])).shape == noisy.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": [1]}, "must be as many as widths, 2"),
        ({"attention": [2]}, "must be < 2, the number of widths"),
        ({"head": 5}, "must divide 16"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_images_that_cannot_be_halved_are_refused() -> None:
    with pytest.raises(RecipeError, match="9×8 pixels cannot be"):
        generators.of(tiny()).build((1, 9, 8), 3)
