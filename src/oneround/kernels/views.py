"""Random views of images in one pass over them, as a Triton kernel: what `crop` and `recolour` (data/augment.py) compute, to rounding.

As separate operations a step's views are some eighty small kernels. Here a program makes one view: every pixel is read from its four
neighbours in the image, and the image's mean luminance is summed on the way.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from oneround.config.sections import Augment
from oneround.kernels import launch


@triton.jit
def _sources(start, length, target, size):
    """The neighbour before each target pixel's place in the image, and the weight of the one after it."""
    source = start + (target + 0.5) * length / size - 0.5
    source = tl.minimum(tl.maximum(source, start), start + tl.maximum(length - 1.0, 0.0))
    before = tl.floor(source)
    return before.to(tl.int32), source - before


@triton.jit
def _neighbour(image, row, column, weight, height, width, channel, inside):
    """A neighbour's share of a pixel; one outside the image has none."""
    exists = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    value = tl.load(image + (channel * height + row) * width + column, mask=exists, other=0).to(tl.float32)
    return weight * value / 255.0


@triton.jit
def _channel(image, row, below, column, right, height, width, channel, inside):
    """A channel of the crop, from the four neighbours of every pixel."""
    upper = _neighbour(image, row, column, (1 - below) * (1 - right), height, width, channel, inside)
    upper += _neighbour(image, row, column + 1, (1 - below) * right, height, width, channel, inside)
    lower = _neighbour(image, row + 1, column, below * (1 - right), height, width, channel, inside)
    lower += _neighbour(image, row + 1, column + 1, below * right, height, width, channel, inside)
    return upper + lower


@triton.jit
def _jittered(numbers, column, apply, strength):
    return tl.where(apply, 1.0 + strength * (2.0 * tl.load(numbers + column) - 1.0), 1.0)


@triton.jit
def _views(pixels, numbers, matrices, out, height, width, low, high, thin, log_wider, flip, jitter, brightness, contrast, saturation, hue, greyscale, mean, deviation, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The view of one image; the numbers' columns are those of data/augment.py, the matrices luma, plane and quarter."""
    view, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < height * width
    image, own = pixels + view * CHANNELS * height * width, numbers + view * COLUMNS
    area = low + (high - low) * tl.load(own)
    ratio = thin * tl.exp(log_wider * tl.load(own + 1))
    crop_width = tl.minimum(tl.sqrt(area * ratio), 1.0) * width
    crop_height = tl.minimum(tl.sqrt(area / ratio), 1.0) * height
    target = at % width
    target = tl.where(tl.load(own + 4) < flip, width - 1 - target, target)
    column, right = _sources((width - crop_width) * tl.load(own + 2), crop_width, target, width)
    row, below = _sources((height - crop_height) * tl.load(own + 3), crop_height, at // width, height)

    apply = tl.load(own + 5) < jitter
    bright = _jittered(own, 6, apply, brightness)
    gain = bright * _jittered(own, 7, apply, contrast)
    first = _channel(image, row, below, column, right, height, width, 0, inside)
    if CHANNELS == 1:
        average = tl.sum(tl.where(inside, first, 0.0), 0) / (height * width)
        first = gain * first + (bright - gain) * average
        tl.store(
            out + view * height * width + at, (tl.minimum(tl.maximum(first, 0.0), 1.0) - mean) / deviation, mask=inside
        )
    else:
        green = _channel(image, row, below, column, right, height, width, 1, inside)
        blue = _channel(image, row, below, column, right, height, width, 2, inside)
        luma = tl.load(matrices) * first + tl.load(matrices + 1) * green + tl.load(matrices + 2) * blue
        shift = (bright - gain) * (tl.sum(tl.where(inside, luma, 0.0), 0) / (height * width))
        chroma = tl.where(tl.load(own + 10) < greyscale, 0.0, gain * _jittered(own, 8, apply, saturation))
        turn = tl.where(apply, hue * (2.0 * tl.load(own + 9) - 1.0), 0.0)
        along, across = chroma * tl.cos(turn), chroma * tl.sin(turn)
        for colour in tl.static_range(3):
            of = matrices + 3 * colour
            value = shift + tl.zeros((BLOCK,), tl.float32)
            value += (gain * tl.load(of) + along * tl.load(of + 9) + across * tl.load(of + 18)) * first
            value += (gain * tl.load(of + 1) + along * tl.load(of + 10) + across * tl.load(of + 19)) * green
            value += (gain * tl.load(of + 2) + along * tl.load(of + 11) + across * tl.load(of + 20)) * blue
            value = (tl.minimum(tl.maximum(value, 0.0), 1.0) - mean) / deviation
            tl.store(out + (view * height * width + at) * 3 + colour, value, mask=inside)


def views(pixels: Tensor, numbers: Tensor, options: Augment, colours: Tensor, normalise: tuple[float, float], dtype: torch.dtype) -> Tensor:  # fmt: skip
    """One view of each image, channels-last, normalised by mean and deviation; `colours`: luma, plane and quarter (3, 3, 3)."""
    n, channels, height, width = pixels.shape
    out = torch.empty(pixels.shape, dtype=dtype, device=pixels.device, memory_format=torch.channels_last)
    (low, high), (thin, wide) = options.crop_scale, options.crop_ratio
    launch(_views, (n,), pixels, numbers, colours, out, height, width, low, high, thin, math.log(wide / thin), options.flip or 0.0, options.jitter, options.brightness, options.contrast, options.saturation, 2 * math.pi * options.hue, options.greyscale, *normalise, CHANNELS=channels, COLUMNS=numbers.shape[1], BLOCK=triton.next_power_of_2(height * width), num_warps=8)  # fmt: skip
    return out
