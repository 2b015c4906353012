"""Responses to a dictionary of patches: from a seed alone, the same everywhere, and their formula."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.models.dictionary import CONTRAST
from oneround.models.patches import DEEP_WEIGHT, Patches
from oneround.server.plan import DealtPlan

DIGESTS = """
def digests(threads):
    import hashlib, torch
    from oneround.models.patches import DEEP_WEIGHT, Patches

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    part = Patches(size=400, patch=6)
    constants = part.make((3, 32, 32), 7, None)
    images = torch.linspace(-1, 1, 12 * 3 * 32 * 32).sin().reshape(12, 3, 32, 32)
    outputs = part.build((3, 32, 32), constants)(images)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    return [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in (*constants.values(), outputs)]
"""


def test_features_are_bit_equal_across_processes_and_thread_counts() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", f"{DIGESTS}\nprint(*digests(2))"], stdout=subprocess.PIPE, text=True
    )
    here: dict[str, Callable[[int], list[str]]] = {}
    exec(DIGESTS, here)
    one, three = here["digests"](1), here["digests"](3)
    assert one == three == other.communicate(timeout=120)[0].split() and len(set(one)) == 3


def test_patch_features_are_their_formula(digits: Dataset) -> None:
    part = Patches(size=32, patch=4, threshold=0.3)
    constants = part.make((1, 8, 8), 1, None)
    images = (digits.test.pixels[:5].double() / 255 - 0.5) / 0.5
    filters, offsets = constants["filters"].double().numpy(), constants["offsets"].double().numpy()
    expected = np.zeros((5, 2, 4, 2, 2))
    for n, image in enumerate(images.numpy()[:, 0]):
        for cell in np.ndindex(2, 2):
            places = [range(3), range(2, 5)]
            for top in places[cell[0]]:
                for left in places[cell[1]]:
                    window = image[top : top + 4, left : left + 4].reshape(-1)
                    window = (window - window.mean()) / np.sqrt(window.var() + CONTRAST)
                    r = filters @ window - offsets
                    for sign, response in enumerate((r, -r)):
                        expected[n, sign, :, cell[0], cell[1]] += np.maximum(response - 0.3, 0) / 9
    outputs = part.build((1, 8, 8), constants)(images.float()).numpy()
    assert np.abs(outputs - np.sqrt(expected.reshape(5, -1))).max() < 1e-3
    assert outputs.std() > 0.1


def test_the_second_layer_looks_at_the_first_ones_responses() -> None:
    images = torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    part = Patches(size=64, patch=4, layers=2, maps=3)
    constants = part.make((1, 16, 16), 1, None)
    assert constants["deep.filters"].shape == (4, 6 * 9) and constants["filters"].shape == (4, 16)
    built = part.build((1, 16, 16), constants)
    outputs, first = built(images), Patches(size=32, patch=4).build((1, 16, 16), constants)(images)
    assert outputs.shape == (3, 64) and torch.equal(outputs[:, :32], first)
    responses = torch.nn.functional.unfold(images, 4)
    responses = responses / (responses.var(1, keepdim=True, correction=0) + CONTRAST).sqrt()
    responses = constants["maps.filters"] @ responses - constants["maps.offsets"][:, None]
    signs = torch.cat([responses, -responses], 1).reshape(3, 6, 13, 13)
    maps = (signs - 0.25).relu()[:, :, :12, :12].reshape(3, 6, 6, 2, 6, 2).mean((3, 5)).sqrt()
    deep = {name.removeprefix("deep."): value for name, value in constants.items() if name.startswith("deep.")}
    expected = Patches(size=32, patch=3).build((6, 6, 6), deep)(maps)
    assert torch.allclose(outputs[:, 32:], DEEP_WEIGHT * expected, atol=1e-4) and float(expected.std()) > 0.01


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"size": 100},
            "sums.features.size = 100: must be a multiple of 2·grid² = 8, at least one for each layer; 96 would do",
        ),
        (
            {"patch": 8},
            "sums.features.patch = 8: leaves 1 windows across an image of 8×8, fewer than grid = 2; take 7 or less",
        ),
    ],
)
def test_what_does_not_fit_the_images_is_one_line(digits: Dataset, options: dict[str, int], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        DealtPlan.of(load("ridge", [("sums.features", {"kind": "patches", **options})]), digits)
    assert str(caught.value) == words
