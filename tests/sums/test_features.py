"""The fixed features a recipe asks for are the same at every site."""

from __future__ import annotations

import pytest
import torch

from oneround import acts, sums
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import ProtocolError, RecipeError
from oneround.protocol import Broadcast
from oneround.protocol.encoding import bytes_of, layout_of
from oneround.server.plan import DealtPlan
from oneround.site import Site
from oneround.sums import Moments
from small_sums import SMALL, broadcast_of


@pytest.fixture(scope="module")
def broadcast(digits: Dataset) -> Broadcast:
    return broadcast_of(digits)


def test_mirror_images_are_left_alone_where_they_change_the_label(digits: Dataset) -> None:
    assert broadcast_of(digits).recipe.sums.mirror == "none"  # type: ignore[union-attr]


def test_a_site_that_builds_other_features_says_so(broadcast: Broadcast, digits: Dataset) -> None:
    other = {"features.check": broadcast.extras["features.check"] ^ 1}
    changed = Broadcast(broadcast.recipe, broadcast.class_names, broadcast.shape, {}, other)
    with pytest.raises(ProtocolError, match="seed 1 gives other features here than at the server"):
        acts.train(changed, Site("site", digits.train.take(torch.arange(5))))


def test_patches_of_public_images_travel_in_the_broadcast(digits: Dataset) -> None:
    public = {**SMALL["sums.features"], "source": "public"}
    with pytest.raises(RecipeError, match="its patches come from public images"):
        load("ridge", [("sums.features", public)])
    recipe = load("ridge", [("sums.features", public), ("public", 0.1)])
    broadcast = DealtPlan.of(recipe, digits).prepare()
    assert broadcast.extras["features.filters"].shape == (12, 16)
    assert DealtPlan.of(recipe, digits).traffic.down == bytes_of(layout_of(broadcast.weights)) + bytes_of(
        layout_of(broadcast.extras)
    )
    upload = acts.train(broadcast, Site("site", digits.train.take(torch.arange(300))))
    assert (
        acts.fuse([upload], broadcast).predict(digits.test.pixels).argmax(1).eq(digits.test.labels).float().mean() > 0.7
    )


def test_the_exponent_is_about_the_size_of_the_features_and_is_taken_back(digits: Dataset) -> None:
    masked = broadcast_of(digits, sums__secure=True, reveal__class_counts=False)
    constants = sums.constants_of(masked.recipe, masked.shape, masked.extras)
    seen = sums.features_of(masked.recipe, masked.shape, constants)((digits.test.pixels[:50].float() / 255 - 0.5) / 0.5)
    exponent = int(masked.extras[sums.EXPONENT])
    assert abs(exponent - float(seen.square().mean().sqrt().log2())) < 2
    moments = Moments(*(torch.rand(shape).double() for shape in ((4, 4), (4, 2), (4,), (2,))))
    small = sums.rescale(moments, {sums.EXPONENT: torch.tensor(3)})
    assert torch.equal(small.gram, moments.gram / 64) and torch.equal(small.counts, moments.counts)
    again = sums.rescale(small, {sums.EXPONENT: torch.tensor(3)}, back=True)
    assert torch.equal(again.gram, moments.gram) and torch.equal(again.cross, moments.cross)
    assert torch.equal(sums.rescale(moments, {}).gram, moments.gram)
