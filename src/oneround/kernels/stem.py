"""An encoder's first convolution, 3×3 over the few channels of an image, forward and backward, as Triton kernels.

With three channels cuDNN pads and copies, and reaches 2 % of the matrix-product rate. Here every image is read once and every output
written once. Used by `first_convolution` (models/norm.py) where it applies; results are bit-reproducible (no atomics).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oneround.kernels import launch

PROGRAMS = 528  # programs that share the weights' gradient
PIXELS = 128  # of the output, that a program takes at a time


@triton.jit
def _patches(x, pixel, pixels, height, width, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """What the convolution sees at these pixels: (pixels, TAPS), channel by channel at each of nine neighbours, then zeros."""
    tap = tl.arange(0, TAPS)
    row, column = pixel // width % height, pixel % width
    down, right = tap // CHANNELS // 3 - 1, tap // CHANNELS % 3 - 1
    from_row, from_column = row[:, None] + down[None, :], column[:, None] + right[None, :]
    inside = (from_row >= 0) & (from_row < height) & (from_column >= 0) & (from_column < width)
    inside = inside & (tap < 9 * CHANNELS)[None, :] & (pixel < pixels)[:, None]
    at = (pixel[:, None] + down[None, :] * width + right[None, :]).to(tl.int64) * CHANNELS + (tap % CHANNELS)[None, :]
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def _convolve(x, weight, y, pixels, height, width, CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    pixel, output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, OUTPUTS)
    tap = tl.arange(0, TAPS)
    patches = _patches(x, pixel, pixels, height, width, CHANNELS, TAPS)
    kernel = tl.load(
        weight + output[None, :] * (9 * CHANNELS) + tap[:, None], mask=(tap < 9 * CHANNELS)[:, None], other=0.0
    )
    sums = tl.dot(patches, kernel)
    tl.store(y + pixel.to(tl.int64)[:, None] * OUTPUTS + output[None, :], sums, mask=(pixel < pixels)[:, None])


@triton.jit
def _convolve_weights(x, dy, partial, pixels, height, width, per_program, CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A program's part of the gradient of the weights, (TAPS, OUTPUTS)."""
    tap, output = tl.arange(0, TAPS), tl.arange(0, OUTPUTS)
    sums = tl.zeros((TAPS, OUTPUTS), tl.float32)
    for start in range(0, per_program, BLOCK):
        pixel = tl.program_id(0) * per_program + start + tl.arange(0, BLOCK)
        patches = _patches(x, pixel, pixels, height, width, CHANNELS, TAPS)
        g = tl.load(
            dy + pixel.to(tl.int64)[:, None] * OUTPUTS + output[None, :], mask=(pixel < pixels)[:, None], other=0.0
        )
        sums += tl.dot(tl.trans(patches), g)
    tl.store(partial + (tl.program_id(0) * TAPS + tap[:, None]) * OUTPUTS + output[None, :], sums)


def _taps(channels: int) -> int:
    """Numbers of a patch, with zeros up to a power of two, as a matrix product takes them."""
    return max(16, int(triton.next_power_of_2(9 * channels)))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        outputs = len(weight)
        y = torch.empty(n, outputs, height, width, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        kernel = weight.to(x.dtype).contiguous(memory_format=torch.channels_last)
        pixels = n * height * width
        launch(_convolve, (triton.cdiv(pixels, PIXELS),), x, kernel, y, pixels, height, width, CHANNELS=channels, OUTPUTS=outputs, TAPS=_taps(channels), BLOCK=PIXELS)  # fmt: skip
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        n, channels, height, width = x.shape
        outputs, taps, pixels = dy.shape[1], _taps(channels), n * height * width
        per_program = triton.cdiv(pixels, PROGRAMS * PIXELS) * PIXELS
        parts = triton.cdiv(pixels, per_program)
        partial = torch.empty(parts, taps, outputs, device=x.device)
        launch(_convolve_weights, (parts,), x, dy, partial, pixels, height, width, per_program, CHANNELS=channels, OUTPUTS=outputs, TAPS=taps, BLOCK=PIXELS)  # fmt: skip
        summed = partial.sum(0)[: 9 * channels].T.reshape(outputs, 3, 3, channels)
        return None, summed.permute(0, 3, 1, 2)


def convolve(images: Tensor, weight: Tensor) -> Tensor:
    """The 3×3 convolution with padding 1 of images (n, channels, height, width), channels-last, which get no gradient."""
    out: Tensor = _Convolution.apply(images, weight)  # type: ignore[no-untyped-call]
    return out
