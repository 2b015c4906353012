"""A dictionary of patches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oneround.models.dictionary import CONTRAST, GRID, dictionary, one_thread
from oneround.models.patches import Patches


@pytest.mark.slow
def test_a_seed_is_a_dictionary() -> None:
    part = Patches(size=32, patch=4)
    first, second = (part.make((1, 8, 8), seed, None)["filters"] for seed in (1, 2))
    assert not torch.equal(first, second)
    assert first.shape == (4, 16) and float(first.sum(1).abs().max()) < 1e-3


def noise(n: int = 40, channels: int = 2) -> np.ndarray:
    return np.random.RandomState(3).random_sample((n, channels, 12, 12))


def test_filters_see_no_brightness_and_are_rounded_to_a_grid() -> None:
    made = dictionary(noise(), 6, 3, 0.3, 500, np.random.RandomState(1))
    assert made["filters"].shape == (6, 18) and made["offsets"].shape == (6,)
    assert made["filters"].dtype == torch.float32 and float(made["filters"].sum(1).abs().max()) < 18 * GRID
    for values in made.values():
        assert torch.equal((values.double() / GRID).round() * GRID, values.double())
    again = dictionary(noise(), 6, 3, 0.3, 500, np.random.RandomState(1))
    assert all(torch.equal(again[name], value) for name, value in made.items())


def test_an_entry_answers_its_own_window_most() -> None:
    """Whitened windows of length 1: none is nearer to an entry than the window it was cut from."""
    images = noise(30, 1)
    made = dictionary(images, 5, 4, 0.3, 400, np.random.RandomState(2))
    windows = torch.nn.functional.unfold(torch.from_numpy(images), 4).transpose(1, 2).reshape(-1, 16)
    windows = windows - windows.mean(1, keepdim=True)
    windows = windows / (windows.square().mean(1, keepdim=True) + CONTRAST).sqrt()
    responses = windows @ made["filters"].double().T - made["offsets"].double()
    assert (responses.max(0).values > 3 * responses.std(0)).all()


def test_more_entries_than_telling_windows_are_repeated() -> None:
    made = dictionary(noise(1, 1), 200, 11, 0.3, 8, np.random.RandomState(1))
    assert made["filters"].shape == (200, 121) and len(made["filters"].unique(dim=0)) <= 4


def test_one_thread_inside_and_as_many_as_before_outside() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="inside"), one_thread():
            assert torch.get_num_threads() == 1
            raise ValueError("inside")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
