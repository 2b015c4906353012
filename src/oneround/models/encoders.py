"""Encoders for small images: a few convolutions, ResNets with a 3×3 stem, MobileNetV2 with early strides removed.

An encoder maps (n, channels, height, width) to features (n, features). Sizes of 8 to 64 pixels, 1 or 3 channels.
ResNet: He et al., 2016 (basic and bottleneck blocks). MobileNetV2: Sandler et al., 2018.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from oneround.config.parts import In, Part, Slot
from oneround.models.norm import again, first_convolution, normalise, pointwise

Norm = Literal["batch", "group"]
MakeNorm = Callable[[int], nn.Module]


class Encoder(nn.Module):
    """Images → features; `features` is their number."""

    features: int


class EncoderPart(Part):
    """An architecture that can be built for a number of input channels."""

    norm: Norm = "batch"
    """Batch norm, or group norm (no statistics to average, no dependence on the batch)."""

    def build(self, channels: int) -> Encoder:
        raise NotImplementedError

    def make_norm(self, channels: int) -> nn.Module:
        # Group norm with up to 32 groups of at least two channels each.
        return nn.BatchNorm2d(channels) if self.norm == "batch" else nn.GroupNorm(math.gcd(32, channels // 2), channels)


encoders: Slot[EncoderPart] = Slot("encoder", EncoderPart)


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)


# --- a small network ---------------------------------------------------------------------------------------------------


class SmallConvNet(Encoder):
    """Three 3×3 convolutions; the resolution is halved after each but the last, then averaged."""

    def __init__(self, channels: int, width: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.features = 4 * width
        widths = [channels, width, 2 * width, 4 * width]
        self.convolutions = nn.ModuleList(_conv(a, b) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(make_norm(b) for b in widths[1:])

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for depth, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = normalise(norm, convolution(x) if depth else first_convolution(convolution, x))
            if depth < 2:
                x = halved(x)
        return x.mean((2, 3))


def halved(x: Tensor) -> Tensor:
    """The largest of every 2×2 values. Where no gradient is asked for, a CPU needs no indices, and comparing slices is 15 times as fast."""
    if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.max_pool2d(x, 2)
    height, width = (size // 2 * 2 for size in x.shape[2:])
    rows = torch.maximum(x[:, :, 0:height:2], x[:, :, 1:height:2])
    return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])


@encoders.register("cnn")
class Cnn(EncoderPart):
    """Three convolutions: for digits, demonstrations and tests."""

    width: Annotated[int, Field(ge=2, le=512, multiple_of=2)] = 32

    def build(self, channels: int) -> Encoder:
        return SmallConvNet(channels, self.width, self.make_norm)


# --- another width ---------------------------------------------------------------------------------------------------


class LinearlyProjected(Encoder):
    """A linear layer after another encoder."""

    def __init__(self, encoder: Encoder, width: int) -> None:
        super().__init__()
        self.encoder, self.projection, self.features = encoder, nn.Linear(encoder.features, width), width

    def forward(self, images: Tensor) -> Tensor:
        projected: Tensor = self.projection(self.encoder(images))
        return projected


@encoders.register("projected")
class Projected(EncoderPart):
    """Another encoder with a linear layer to so many features."""

    encoder: Annotated[Part, In("encoder")] = Field(default="resnet18", validate_default=True)
    width: Annotated[int, Field(ge=2, le=4096)] = 256

    @model_validator(mode="after")
    def _norm_is_the_inner_one(self) -> Projected:
        if self.norm != "batch":
            raise ValueError(f"norm = {self.norm}: is the inner encoder's; set encoder.norm of this part")
        return self

    def build(self, channels: int) -> Encoder:
        return LinearlyProjected(encoders.of(self.encoder).build(channels), self.width)


# --- residual networks -------------------------------------------------------------------------------------------------


class Basic(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, width, 3, stride), make_norm(width)
        self.conv2, self.norm2 = _conv(width, width), make_norm(width)
        self.shortcut = _shortcut(inputs, width, stride, make_norm)

    def forward(self, x: Tensor) -> Tensor:
        out = normalise(self.norm1, self.conv1(x))
        return _join(self.norm2, self.conv2(out), self.shortcut, x)


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 around a shortcut; the output is four times as wide."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, make_norm: MakeNorm) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.norm1 = _conv(inputs, width, 1), make_norm(width)
        self.conv2, self.norm2 = _conv(width, width, 3, stride), make_norm(width)
        self.conv3, self.norm3 = _conv(width, outputs, 1), make_norm(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride, make_norm)

    def forward(self, x: Tensor) -> Tensor:
        out = normalise(self.norm1, self.conv1(x))
        out = normalise(self.norm2, self.conv2(out))
        return _join(self.norm3, self.conv3(out), self.shortcut, x)


class Projection(nn.Module):
    """What a shortcut between different shapes is made of."""

    def __init__(self, inputs: int, outputs: int, stride: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.conv, self.norm = _conv(inputs, outputs, 1, stride), make_norm(outputs)


def _join(norm: nn.Module, x: Tensor, shortcut: nn.Module, start: Tensor) -> Tensor:
    """The end of a block: relu(norm(x) + shortcut(start))"""
    if isinstance(shortcut, Projection):
        return normalise(norm, x, pointwise(shortcut.conv, again(start)), added_norm=shortcut.norm)
    return normalise(norm, x, again(start))


def _shortcut(inputs: int, outputs: int, stride: int, make_norm: MakeNorm) -> nn.Module:
    return nn.Identity() if stride == 1 and inputs == outputs else Projection(inputs, outputs, stride, make_norm)


class ResNet(Encoder):
    """Four stages of 64, 128, 256, 512 channels at full, half, quarter and eighth resolution."""

    def __init__(
        self, channels: int, block: type[Basic | Bottleneck], depths: tuple[int, ...], make_norm: MakeNorm
    ) -> None:
        super().__init__()
        self.stem, self.norm = _conv(channels, 64), make_norm(64)
        inputs, blocks = 64, []
        for stage, depth in enumerate(depths):
            for number in range(depth):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(block(inputs, 64 * 2**stage, stride, make_norm))
                inputs = 64 * 2**stage * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.features = inputs

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.blocks(normalise(self.norm, first_convolution(self.stem, images)))
        return maps.mean((2, 3))


@encoders.register("resnet18")
class ResNet18(EncoderPart):
    """11.2 million parameters, 512 features."""

    def build(self, channels: int) -> Encoder:
        return ResNet(channels, Basic, (2, 2, 2, 2), self.make_norm)


@encoders.register("resnet34")
class ResNet34(EncoderPart):
    """21.3 million parameters, 512 features."""

    def build(self, channels: int) -> Encoder:
        return ResNet(channels, Basic, (3, 4, 6, 3), self.make_norm)


@encoders.register("resnet50")
class ResNet50(EncoderPart):
    """23.5 million parameters, 2048 features."""

    def build(self, channels: int) -> Encoder:
        return ResNet(channels, Bottleneck, (3, 4, 6, 3), self.make_norm)


# --- MobileNetV2 -------------------------------------------------------------------------------------------------------


class Chain(nn.Sequential):
    """Convolutions, norms and (except at the end of a block) ReLU6 in sequence."""

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """`added`: a shortcut, added after the last norm."""
        layers = list(self)
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            if isinstance(layer, nn.Conv2d):
                x = first_convolution(layer, x)
            elif not isinstance(layer, nn.ReLU6):  # a norm
                x = normalise(layer, x, added if following is None else None, "relu6" if following else None)
        return x


class InvertedResidual(nn.Module):
    """Expand by 1×1, filter each channel by 3×3, project back by 1×1; a shortcut where shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, make_norm: MakeNorm) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [_conv(inputs, hidden, 1), make_norm(hidden), nn.ReLU6()]
        layers += [_conv(hidden, hidden, 3, stride, groups=hidden), make_norm(hidden), nn.ReLU6()]
        layers += [_conv(hidden, outputs, 1), make_norm(outputs)]
        self.layers = Chain(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x, again(x) if self.residual else None)
        return out


class MobileNet(Encoder):
    """The published stages (expansion, channels, blocks, stride), with the first two strides taken out for small images."""

    stages = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, channels: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.features = 1280
        self.stem = Chain(_conv(channels, 32), make_norm(32), nn.ReLU6())
        inputs, blocks = 32, []
        for expansion, outputs, depth, stride in self.stages:
            for number in range(depth):
                blocks.append(InvertedResidual(inputs, outputs, stride if number == 0 else 1, expansion, make_norm))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.last = Chain(_conv(inputs, 1280, 1), make_norm(1280), nn.ReLU6())

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.last(self.blocks(self.stem(images)))
        return maps.mean((2, 3))


@encoders.register("mobilenet-v2")
class MobileNetV2(EncoderPart):
    """2.2 million parameters, 1280 features."""

    def build(self, channels: int) -> Encoder:
        return MobileNet(channels, self.make_norm)
