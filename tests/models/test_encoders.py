"""Encoders: the published sizes, every image size and norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oneround.models import encoders
from oneround.models.encoders import halved

# Parameters of the published networks without their classifier, for three channels: ResNets with the 3×3 stem for small
# images (11,173,962, 21,282,122 and 23,520,842 with ten classes), MobileNetV2 (3,504,872 with a thousand).
PUBLISHED = {
    "resnet18": (11_173_962 - (512 + 1) * 10, 512),
    "resnet34": (21_282_122 - (512 + 1) * 10, 512),
    "resnet50": (23_520_842 - (2048 + 1) * 10, 2048),
    "mobilenet-v2": (3_504_872 - (1280 + 1) * 1000, 1280),
}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("kind", PUBLISHED)
def test_parameters_and_features_are_the_published_ones(kind: str) -> None:
    parameters, features = PUBLISHED[kind]
    encoder = encoders.parse(kind).build(3)
    assert count(encoder) == parameters
    assert encoder.features == features


@pytest.mark.parametrize("kind", ["cnn", *PUBLISHED])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 32), (3, 64), (1, 28)])
def test_every_encoder_takes_every_size(kind: str, norm: str, channels: int, size: int) -> None:
    encoder = encoders.parse({"kind": kind, "norm": norm}).build(channels)
    with torch.no_grad():
        features = encoder.train()(torch.randn(2, channels, size, size))
    assert features.shape == (2, encoder.features)
    assert torch.isfinite(features).all()
    norms = {type(module) for module in encoder.modules()} & {nn.BatchNorm2d, nn.GroupNorm}
    assert norms == {nn.BatchNorm2d if norm == "batch" else nn.GroupNorm}


def test_a_projection_is_a_linear_layer_on_another_encoders_features() -> None:
    encoder = encoders.parse({"kind": "projected", "encoder": {"kind": "cnn", "width": 4}, "width": 6}).build(1).eval()
    images = torch.randn(3, 1, 8, 8)
    assert encoder.features == 6 and count(encoder) == count(encoder.encoder) + 16 * 6 + 6
    assert torch.allclose(encoder(images), encoder.projection(encoder.encoder(images)))
    with pytest.raises(ValueError, match=r"norm = group: is the inner encoder's; set encoder\.norm"):
        encoders.parse({"kind": "projected", "norm": "group"})


@pytest.mark.parametrize("size", [8, 9, 28])
def test_halving_without_gradients_is_max_pooling_to_the_bit(size: int) -> None:
    x = torch.randn(3, 4, size, size + 1).relu()
    x[1, 2, 3, 3] = float("nan")
    for layout in (torch.contiguous_format, torch.channels_last):
        images = x.contiguous(memory_format=layout)
        pooled = F.max_pool2d(images, 2)
        with torch.no_grad():
            halves = halved(images)
        assert torch.equal(halves.nan_to_num(-1), pooled.nan_to_num(-1)) and halves.stride() == pooled.stride()


def test_halving_gives_all_of_a_gradient_to_one_of_equal_values() -> None:
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    halved(x).sum().backward()
    assert x.grad is not None and sorted(x.grad.flatten().tolist()) == [0, 0, 0, 1]


def test_resnet_strides_halve_three_times() -> None:
    shapes = []
    encoder = encoders.parse("resnet18").build(3)
    for block in encoder.blocks:
        block.register_forward_hook(lambda module, inputs, out: shapes.append(tuple(out.shape[1:])))
    encoder(torch.randn(1, 3, 32, 32))
    assert shapes[1::2] == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]


def test_mobilenet_keeps_the_resolution_of_small_images() -> None:
    shapes = []
    encoder = encoders.parse("mobilenet-v2").build(3)
    encoder.blocks.register_forward_hook(lambda module, inputs, out: shapes.append(tuple(out.shape[1:])))
    encoder(torch.randn(1, 3, 32, 32))
    assert shapes == [(320, 4, 4)]


def test_mobilenet_is_its_layers_one_after_another_and_the_shortcut() -> None:
    torch.manual_seed(0)
    encoder, x = encoders.parse("mobilenet-v2").build(3).eval(), torch.randn(2, 3, 16, 16)
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 3.0)  # so that ReLU6 has something to cut
    shortcuts = 0
    with torch.no_grad():
        features = encoder(x)
        x = nn.Sequential(*encoder.stem)(x)
        for block in encoder.blocks:
            out = nn.Sequential(*block.layers)(x)
            shortcuts += x.shape == out.shape
            x = x + out if x.shape == out.shape else out
        x = nn.Sequential(*encoder.last)(x)
    assert shortcuts == 10 and float(x.max()) == 6.0
    assert torch.equal(features, x.mean((2, 3)))
