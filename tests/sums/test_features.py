"""Fixed features: from a seed alone, the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from small_sums import SMALL, sent

from oneround import acts, sums
from oneround.data import Dataset, Images
from oneround.errors import OneroundError, ProtocolError, RecipeError
from oneround.models import initialise
from oneround.models.dictionary import CONTRAST
from oneround.models.leaves import dead_leaves
from oneround.models.patches import DEEP_WEIGHT, Patches
from oneround.protocol import Broadcast
from oneround.reading import load, parse_part
from oneround.runs import Plan
from oneround.site import Site

DIGESTS = """
def digests(threads):
    import hashlib, torch
    from oneround.models.patches import DEEP_WEIGHT, Patches

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    part = Patches(size=400, patch=6)
    constants = part.make((3, 32, 32), 7, None)
    images = torch.linspace(-1, 1, 12 * 3 * 32 * 32).sin().reshape(12, 3, 32, 32)
    seen = part.build((3, 32, 32), constants)(images)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    return [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in (*constants.values(), seen)]
"""


@pytest.fixture(scope="module")
def broadcast(digits: Dataset) -> Broadcast:
    return sent(digits)


def test_features_are_bit_equal_across_processes_and_thread_counts() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", f"{DIGESTS}\nprint(*digests(2))"], stdout=subprocess.PIPE, text=True
    )
    here: dict[str, Callable[[int], list[str]]] = {}
    exec(DIGESTS, here)
    one, three = here["digests"](1), here["digests"](3)
    assert one == three == other.communicate(timeout=120)[0].split() and len(set(one)) == 3


def test_a_seed_is_a_dictionary() -> None:
    part = Patches(size=32, patch=4)
    first, second = (part.make((1, 8, 8), seed, None)["filters"] for seed in (1, 2))
    assert not torch.equal(first, second)
    assert first.shape == (4, 16) and float(first.sum(1).abs().max()) < 1e-3


def test_patch_features_are_their_formula(digits: Dataset) -> None:
    part = Patches(size=32, patch=4, threshold=0.3)
    constants = part.make((1, 8, 8), 1, None)
    images = (digits.test.pixels[:5].double() / 255 - 0.5) / 0.5
    filters, offsets = constants["filters"].double().numpy(), constants["offsets"].double().numpy()
    wanted = np.zeros((5, 2, 4, 2, 2))
    for n, image in enumerate(images.numpy()[:, 0]):
        for cell in np.ndindex(2, 2):
            places = [range(3), range(2, 5)]
            for top in places[cell[0]]:
                for left in places[cell[1]]:
                    window = image[top : top + 4, left : left + 4].reshape(-1)
                    window = (window - window.mean()) / np.sqrt(window.var() + CONTRAST)
                    r = filters @ window - offsets
                    for sign, response in enumerate((r, -r)):
                        wanted[n, sign, :, cell[0], cell[1]] += np.maximum(response - 0.3, 0) / 9
    found = part.build((1, 8, 8), constants)(images.float()).numpy()
    assert np.abs(found - np.sqrt(wanted.reshape(5, -1))).max() < 1e-3
    assert found.std() > 0.1


def test_the_second_layer_looks_at_the_first_ones_responses() -> None:
    images = torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    part = Patches(size=64, patch=4, layers=2, maps=3)
    constants = part.make((1, 16, 16), 1, None)
    assert constants["deep.filters"].shape == (4, 6 * 9) and constants["filters"].shape == (4, 16)
    built = part.build((1, 16, 16), constants)
    seen, first = built(images), Patches(size=32, patch=4).build((1, 16, 16), constants)(images)
    assert seen.shape == (3, 64) and torch.equal(seen[:, :32], first)
    responses = torch.nn.functional.unfold(images, 4)
    responses = responses / (responses.var(1, keepdim=True, correction=0) + CONTRAST).sqrt()
    responses = constants["maps.filters"] @ responses - constants["maps.offsets"][:, None]
    signs = torch.cat([responses, -responses], 1).reshape(3, 6, 13, 13)
    maps = (signs - 0.25).relu()[:, :, :12, :12].reshape(3, 6, 6, 2, 6, 2).mean((3, 5)).sqrt()
    deep = {name.removeprefix("deep."): value for name, value in constants.items() if name.startswith("deep.")}
    wanted = Patches(size=32, patch=3).build((6, 6, 6), deep)(maps)
    assert torch.allclose(seen[:, 32:], DEEP_WEIGHT * wanted, atol=1e-4) and float(wanted.std()) > 0.01


def test_symmetric_features_do_not_know_left_from_right(digits: Dataset) -> None:
    images = (digits.test.pixels[:20].float() / 255 - 0.5) / 0.5
    for mirror, equal in (("features", True), ("none", False)):
        told = sent(digits, sums__mirror=mirror)
        seen = sums.features_of(told.recipe, told.shape, sums.constants_of(told.recipe, told.shape, told.extras))
        assert torch.allclose(seen(images), seen(images.flip(3)), atol=1e-5) is equal


def test_mirror_images_are_left_alone_where_they_change_the_label(digits: Dataset) -> None:
    assert sent(digits).recipe.sums.mirror == "none"  # type: ignore[union-attr]


def test_leaves_cover_the_image_and_need_no_data() -> None:
    images = dead_leaves(3, 3, 32, 5)
    assert images.shape == (3, 3, 32, 32) and images.min() >= 0 and images.max() <= 1
    assert np.array_equal(images, dead_leaves(3, 3, 32, 5)) and not np.array_equal(images, dead_leaves(3, 3, 32, 6))
    assert 0.1 < images.std() < 0.4 and (images == 0).mean() < 0.2


def test_a_site_that_builds_other_features_says_so(broadcast: Broadcast, digits: Dataset) -> None:
    other = {"features.check": broadcast.extras["features.check"] ^ 1}
    changed = Broadcast(broadcast.recipe, broadcast.class_names, broadcast.shape, {}, other)
    with pytest.raises(ProtocolError, match="seed 1 gives other features here than at the server"):
        acts.train(changed, Site("site", digits.train.take(torch.arange(5))))


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
        Plan.of(load("ridge", [("sums.features", {"kind": "patches", **options})]), digits)
    assert str(caught.value) == words


def test_patches_of_public_images_travel_in_the_broadcast(digits: Dataset) -> None:
    public = {**SMALL["sums.features"], "source": "public"}
    with pytest.raises(RecipeError, match="its patches come from public images"):
        load("ridge", [("sums.features", public)])
    recipe = load("ridge", [("sums.features", public), ("public", 0.1)])
    told = Plan.of(recipe, digits).prepare()
    assert told.extras["features.filters"].shape == (12, 16)
    assert Plan.of(recipe, digits).traffic.down == told.size
    own = acts.train(told, Site("site", digits.train.take(torch.arange(300))))
    assert acts.fuse([own], told).predict(digits.test.pixels).argmax(1).eq(digits.test.labels).float().mean() > 0.7


def test_a_frozen_encoder_is_read_at_the_server_and_sent(digits: Dataset, tmp_path: Path) -> None:
    part = {"kind": "encoder", "encoder": {"kind": "cnn", "width": 8}}
    with pytest.raises(RecipeError, match="there is no encoder to freeze; name its file"):
        sent(digits, sums__features=part)
    net = initialise(parse_part("encoder", part["encoder"]), 1, 10, 3)
    safetensors.torch.save_file(net.encoder.state_dict(), tmp_path / "encoder.safetensors")
    told = sent(digits, sums__features=part, local__frozen_encoder=str(tmp_path / "encoder.safetensors"))
    site = Site("site", digits.train.take(torch.arange(400)))
    upload = acts.train(Broadcast.unpack(told.pack()), site)
    assert upload.sums["total"].shape == (32,) and not upload.weights
    assert acts.traffic(told.recipe, 10, told.shape, 0).down == told.size
    images = (digits.test.pixels[:1].float() / 255 - 0.5) / 0.5
    lone = acts.train(told, Site("one", Images(digits.test.pixels[:1], digits.test.labels[:1])))
    with torch.no_grad():
        assert torch.allclose(lone.sums["total"].float(), net.encoder.eval()(images)[0], atol=1e-5)
    (tmp_path / "encoder.safetensors").write_bytes(b"broken")
    with pytest.raises(OneroundError, match=r"^local\.frozen_encoder = "):
        sent(digits, sums__features=part, local__frozen_encoder=str(tmp_path / "encoder.safetensors"))
