"""Generators: networks that learn the velocity from images to noise, given the time and the class.

U-Net (Ronneberger et al., 2015) as in diffusion models (Ho et al., 2020; Dhariwal & Nichol, 2021): residual blocks whose group norms
are scaled and shifted by an embedding of time and class, attention where images are small, and shortcuts from the way down to the
way up. The last convolution of every block starts at 0, so that a fresh network predicts 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from oneround.config.parts import Part, Slot
from oneround.config.sections import Count
from oneround.errors import RecipeError
from oneround.seeds import derive

Shape = tuple[int, int, int]
FREQUENCIES = 128
"""Sines and cosines that a time is embedded in."""
SHORTEST, LONGEST = 1e-3, 10.0
"""Their periods over 2π, in units of the time from image to noise."""


class Generator(nn.Module):
    """Noisy images at times in 0…1, and classes → velocities; `no_class` stands for any class."""

    no_class: int

    def forward(self, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """noisy (n, channels, height, width), times (n,), labels (n,) → (n, channels, height, width)"""
        raise NotImplementedError


class GeneratorPart(Part):
    """An architecture that can be built for an image's shape and a number of classes."""

    def build(self, shape: Shape, classes: int) -> Generator:
        raise NotImplementedError


generators: Slot[GeneratorPart] = Slot("generator", GeneratorPart, default="unet")


@generators.register("unet")
class UNet(GeneratorPart):
    """A U-Net; as it stands, 11.6 million parameters for images of 32×32 pixels in colour."""

    widths: list[Annotated[int, Field(ge=2, le=1024, multiple_of=2)]] = Field(default=[128, 192, 256], min_length=1)
    """Channels at every resolution: the image's, half, a quarter, …"""
    blocks: list[Count] = Field(default=[2, 2, 3])
    """Residual blocks at every resolution, on the way down and on the way up; at the last one only once."""
    attention: list[Annotated[int, Field(ge=0)]] = Field(default=[1, 2])
    """Resolutions with attention, counted from 0: after their last block, both ways."""
    head: Count = 64
    """Channels of an attention head."""

    @model_validator(mode="after")
    def _resolutions_agree(self) -> UNet:
        if len(self.blocks) != len(self.widths):
            raise ValueError(f"blocks = {self.blocks}: must be as many as widths, {len(self.widths)}")
        for level in self.attention:
            if level >= len(self.widths):
                raise ValueError(f"attention = {self.attention}: must be < {len(self.widths)}, the number of widths")
            if self.widths[level] % self.head:
                raise ValueError(f"head = {self.head}: must divide {self.widths[level]}, the width where it attends")
        return self

    def build(self, shape: Shape, classes: int) -> Generator:
        times = 2 ** (len(self.widths) - 1)
        if shape[1] % times or shape[2] % times:
            raise RecipeError(
                f"generator.network: halves images {len(self.widths) - 1} times, and {shape[1]}×{shape[2]} pixels cannot be; "
                "name fewer widths and blocks"
            )
        return _UNet(self, shape[0], classes)


def _groups(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(32, channels // 2), channels)


def _from_zero(convolution: nn.Conv2d) -> nn.Conv2d:
    for parameter in convolution.parameters():
        nn.init.zeros_(parameter)
    return convolution


class Residual(nn.Module):
    """Two 3×3 convolutions around a shortcut; the second norm is scaled and shifted by the embedding."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _groups(inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.modulation = nn.Linear(embedding, 2 * outputs)
        self.norm2, self.conv2 = _groups(outputs), _from_zero(nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.modulation(embedding)[:, :, None, None].chunk(2, 1)
        out = self.conv2(F.silu(self.norm2(out) * (1 + scale) + shift))
        joined: Tensor = out + self.shortcut(x)
        return joined


class Attention(nn.Module):
    """Every pixel attends to all others."""

    def __init__(self, channels: int, head: int) -> None:
        super().__init__()
        self.heads = channels // head
        self.norm, self.inputs = _groups(channels), nn.Conv2d(channels, 3 * channels, 1)
        self.outputs = _from_zero(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        pixels = self.inputs(self.norm(x)).permute(0, 2, 3, 1).reshape(n, height * width, 3, self.heads, -1)
        query, key, value = pixels.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        joined: Tensor = x + self.outputs(mixed.reshape(n, height, width, channels).permute(0, 3, 1, 2))
        return joined


class Level(nn.Module):
    """The blocks of one resolution, one way, and the attention after them."""

    def __init__(self, widths: list[tuple[int, int]], embedding: int, head: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(inputs, outputs, embedding) for inputs, outputs in widths)
        self.attention = Attention(widths[-1][1], head) if head else nn.Identity()

    def outputs(self, x: Tensor, embedding: Tensor, passed: list[Tensor] | None = None) -> Iterator[Tensor]:
        """What every block makes, the attention after the last. `passed`: from the way down, the last first, joined to their inputs."""
        for number, block in enumerate(self.blocks, start=1):
            x = block(x if passed is None else torch.cat([x, passed.pop()], 1), embedding)
            if number == len(self.blocks):
                x = self.attention(x)
            yield x


class _UNet(Generator):
    def __init__(self, options: UNet, channels: int, classes: int) -> None:
        super().__init__()
        widths, embedding = options.widths, 4 * options.widths[0]
        heads = [options.head if level in options.attention else None for level in range(len(widths))]
        self.no_class = classes
        self.time = nn.Sequential(nn.Linear(FREQUENCIES, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.classes = nn.Parameter(torch.empty(classes + 1, embedding))
        nn.init.uniform_(self.classes, -(3**0.5), 3**0.5)
        self.first = nn.Conv2d(channels, widths[0], 3, padding=1)
        down, up, inputs = list[Level](), list[Level](), widths[0]
        for level, (width, count) in enumerate(zip(widths, options.blocks, strict=True)):
            pairs = [(width if number else inputs, width) for number in range(count)]
            down.append(Level(pairs, embedding, heads[level]))
            inputs = width
        for level in reversed(range(len(widths) - 1)):
            width, count = widths[level], options.blocks[level]
            pairs = [((width if number else inputs) + width, width) for number in range(count)]
            up.append(Level(pairs, embedding, heads[level]))
            inputs = width
        self.down: Sequence[Level] = nn.ModuleList(down)  # type: ignore[assignment]
        self.up: Sequence[Level] = nn.ModuleList(up)  # type: ignore[assignment]
        self.norm, self.last = _groups(widths[0]), _from_zero(nn.Conv2d(widths[0], channels, 3, padding=1))
        last = FREQUENCIES // 2 - 1  # on the meta device PyTorch would load its compiler for powers of a tensor
        frequencies = [(LONGEST / SHORTEST) ** (number / last) / LONGEST for number in range(last + 1)]
        self.register_buffer("frequencies", torch.tensor(frequencies), persistent=False)

    def forward(self, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        angles = times.float()[:, None] * self.get_buffer("frequencies")
        embedding = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.classes[labels])
        x, passed = self.first(noisy), list[Tensor]()
        for number, level in enumerate(self.down):
            x = x if number == 0 else F.avg_pool2d(x, 2)
            made = list(level.outputs(x, embedding))
            x = made[-1]
            passed += made if number + 1 < len(self.down) else []
        for level in self.up:
            *_, x = level.outputs(F.interpolate(x, scale_factor=2.0, mode="nearest"), embedding, passed)
        velocity: Tensor = self.last(F.silu(self.norm(x)))
        return velocity


def meta_generator(part: Part, shape: Shape, classes: int) -> Generator:
    """The generator on the meta device: shapes and types without values."""
    with torch.device("meta"):
        return generators.of(part).build(shape, classes)


def initial_generator(part: Part, shape: Shape, classes: int, seed: int) -> Generator:
    """A fresh generator, by its layers' own rules; it depends only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "generator"))
        return generators.of(part).build(shape, classes)


def generator_from(part: Part, shape: Shape, classes: int, weights: Mapping[str, Tensor]) -> Generator:
    """The generator with a copy of these weights."""
    with torch.random.fork_rng(devices=[]):
        net = generators.of(part).build(shape, classes)
    net.load_state_dict(dict(weights))
    return net
