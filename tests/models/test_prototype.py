"""The network every client trains: weights that depend on the seed alone, and both heads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oneround.models.encoders import encoders
from oneround.models.prototype import build, initialise, network_from
from oneround.training.objective import Batch, CrossEntropy


def test_initial_weights_depend_on_the_seed_alone() -> None:
    part = encoders.parse("cnn")
    torch.manual_seed(5)
    first = initialise(part, 1, 10, seed=1).weights()
    torch.manual_seed(6)
    before = torch.get_rng_state()
    second, other = initialise(part, 1, 10, seed=1).weights(), initialise(part, 1, 10, seed=2).weights()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["encoder.convolutions.0.weight"], other["encoder.convolutions.0.weight"])
    assert not torch.equal(first["prototypes"], other["prototypes"])


def test_prototypes_start_standard_normal() -> None:
    prototypes = initialise(encoders.parse("resnet18"), 3, 100, seed=1).prototypes
    assert prototypes.shape == (100, 512)
    assert abs(float(prototypes.mean())) < 0.02 and abs(float(prototypes.std()) - 1) < 0.02


def test_weights_are_a_copy_and_fill_a_network() -> None:
    part = encoders.parse("cnn")
    net = build(part, 1, 10)
    weights = net.weights()
    with torch.no_grad():
        net.prototypes.add_(1)
    assert not torch.equal(weights["prototypes"], net.prototypes)
    again = network_from(part, 1, 10, net.weights()).eval()
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(again(images), net.eval()(images))


@pytest.mark.parametrize(
    ("kind", "parameters", "last"), [("mobilenet-v2", 2_351_972, (100, 1280)), ("resnet50", 23_705_252, (100, 2048))]
)
def test_published_sizes_for_a_hundred_classes(kind: str, parameters: int, last: tuple[int, int]) -> None:
    net = initialise(encoders.parse(kind), 3, 100, seed=1, head="linear")
    assert sum(each.numel() for each in net.parameters()) == parameters
    assert tuple(net.prototypes.shape) == last
    if kind == "mobilenet-v2":
        assert tuple(net.state_dict()["encoder.blocks.15.layers.6.weight"].shape) == (160, 960, 1, 1)
    with torch.no_grad():
        assert net.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_a_linear_head_is_a_linear_layer() -> None:
    net = initialise(encoders.parse("cnn"), 1, 10, seed=1, head="linear")
    images = torch.randn(6, 1, 8, 8)
    features = net.encoder.eval()(images).detach()
    layer = nn.Linear(net.encoder.features, 10)
    layer.load_state_dict({"weight": net.prototypes.detach(), "bias": net.bias.detach() + 1})  # type: ignore[union-attr]
    net.bias.data += 1  # type: ignore[union-attr]
    assert torch.allclose(net(images), layer(features), atol=1e-5)
    unit, lengths = nn.functional.normalize(features, dim=1), features.norm(dim=1, keepdim=True)
    labels = torch.arange(6)
    batch = Batch(unit, labels, net.prototypes, lengths=lengths, bias=net.bias)
    assert torch.allclose(CrossEntropy().loss(batch), nn.functional.cross_entropy(layer(features), labels), atol=1e-5)
