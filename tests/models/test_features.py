"""Fixed features: symmetric ones, and those of a frozen encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from oneround import acts, sums
from oneround.config.load import parse_part
from oneround.data import Dataset, Images
from oneround.errors import OneroundError, RecipeError
from oneround.models import initialise
from oneround.models.features import Features, Symmetric, features, in_batches
from oneround.protocol import Broadcast
from oneround.protocol.encoding import bytes_of, layout_of
from oneround.site import Site
from small_sums import broadcast_of

PROJECTED = {"kind": "projected", "size": 50, "features": {"kind": "patches", "size": 128, "patch": 4, "grid": 4}}


def test_a_projection_adds_up_every_feature_once_with_a_random_sign(digits: Dataset) -> None:
    message = broadcast_of(digits, sums__features=PROJECTED, sums__mirror="none")
    assert message.sums["total"][0] == (50,) and not [name for name in message.extras if "projection" in name]
    constants = sums.constants_of(message.recipe, message.shape, message.extras)
    images = (digits.test.pixels[:5].float() / 255 - 0.5) / 0.5
    module = sums.features_of(message.recipe, message.shape, constants)
    inner, projected = module.inner(images), module(images)
    order, signs = constants["projection.order"].tolist(), constants["projection.signs"]
    assert sorted(order) == list(range(128)) and set(signs.tolist()) == {-1.0, 1.0}
    expected = torch.zeros(5, 50)
    for position, feature in enumerate(order):
        expected[:, position % 50] += signs[feature] * inner[:, feature]
    assert torch.allclose(projected, expected, atol=1e-6)
    again = broadcast_of(digits, sums__features=PROJECTED, seeds__initialisation=2)
    assert not torch.equal(again.extras["features.check"], message.extras["features.check"])
    with pytest.raises(
        RecipeError, match=r"sums\.features\.size = 200: the features that are projected must be fixed and more"
    ):
        broadcast_of(digits, sums__features={**PROJECTED, "size": 200})


@pytest.mark.slow
def test_symmetric_features_do_not_know_left_from_right(digits: Dataset) -> None:
    images = (digits.test.pixels[:20].float() / 255 - 0.5) / 0.5
    for mirror, equal in (("features", True), ("none", False)):
        message = broadcast_of(digits, sums__mirror=mirror)
        seen = sums.features_of(
            message.recipe, message.shape, sums.constants_of(message.recipe, message.shape, message.extras)
        )
        assert torch.allclose(seen(images), seen(images.flip(3)), atol=1e-5) is equal


def test_a_frozen_encoder_is_read_at_the_server_and_sent(digits: Dataset, tmp_path: Path) -> None:
    part = {"kind": "encoder", "encoder": {"kind": "cnn", "width": 8}}
    with pytest.raises(RecipeError, match="there is no encoder to freeze; name its file"):
        broadcast_of(digits, sums__features=part)
    net = initialise(parse_part("encoder", part["encoder"]), 1, 10, 3)
    safetensors.torch.save_file(net.encoder.state_dict(), tmp_path / "encoder.safetensors")
    message = broadcast_of(digits, sums__features=part, local__frozen_encoder=str(tmp_path / "encoder.safetensors"))
    site = Site("site", digits.train.take(torch.arange(400)))
    upload = acts.train(Broadcast.unpack(message.pack()), site)
    assert upload.sums["total"].shape == (32,) and not upload.weights
    assert acts.traffic(message.recipe, 10, message.shape, 0).down == bytes_of(layout_of(message.extras))
    images = (digits.test.pixels[:1].float() / 255 - 0.5) / 0.5
    lone = acts.train(message, Site("one", Images(digits.test.pixels[:1], digits.test.labels[:1])))
    with torch.no_grad():
        assert torch.allclose(lone.sums["total"].float(), net.encoder.eval()(images)[0], atol=1e-5)
    (tmp_path / "encoder.safetensors").write_bytes(b"broken")
    with pytest.raises(OneroundError, match=r"^local\.frozen_encoder = "):
        broadcast_of(digits, sums__features=part, local__frozen_encoder=str(tmp_path / "encoder.safetensors"))


class FirstPixels(Features):
    size = 3

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)[:, :3]


def test_a_few_images_at_a_time_are_all_of_them() -> None:
    images, sizes = torch.rand(10, 1, 2, 3), []

    def look(some: torch.Tensor) -> torch.Tensor:
        sizes.append(len(some))
        return FirstPixels()(some)

    assert torch.equal(in_batches(look, images, 4, 3), FirstPixels()(images)) and sizes == [4, 4, 2]
    assert in_batches(look, images[:0], 4, 3).shape == (0, 3)


def test_symmetric_features_are_the_mean_of_both() -> None:
    images = torch.arange(12.0).reshape(2, 1, 2, 3)
    symmetric = Symmetric(FirstPixels())
    assert symmetric(images).tolist() == [[1, 1, 1], [7, 7, 7]]
    assert symmetric.size == 3 and symmetric.batch_size == FirstPixels().batch_size


def test_the_size_of_a_frozen_encoder_is_known_without_building_it() -> None:
    part = features.parse({"kind": "encoder", "encoder": "resnet18"})
    assert part.size_for((3, 32, 32)) == 512 and not part.from_seed
    assert part.bytes_down((3, 32, 32)) > 4 * 11_000_000
