"""Batch norm, an added shortcut and ReLU or ReLU6 in one pass over the data, forward and backward, as Triton kernels.

Outside its convolutions a ResNet's training step is memory-bound: as separate operations, batch norm, addition and ReLU read and
write every activation about sixteen times, and PyTorch's own statistics kernel for channels-last bf16 is slow. Here it is eleven
passes, without compiling the whole network. Used by `normalise` (norm.py) where it applies; results are bit-reproducible (no
atomics).

Every tensor is viewed as rows × channels, the layout of channels-last memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oneround.models.norm import Rectifier

PROGRAMS = 528  # programs that share a reduction over rows: four for each of an H200's 132 multiprocessors
ROWS = 64  # rows a program takes at a time


@triton.jit
def _sums(x, first, second, rows, channels, per_program, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Per program and channel: Σ(x − s) and Σ(x − s)², s the first row's value (a shift that avoids cancellation)."""
    part, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(x + column).to(tl.float32)
    one = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    two = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for start in range(0, per_program, BLOCK_ROWS):
        row = part * per_program + start + tl.arange(0, BLOCK_ROWS)
        in_range = (row < rows)[:, None]
        at = row.to(tl.int64)[:, None] * channels + column[None, :]
        value = tl.where(in_range, tl.load(x + at, mask=in_range, other=0.0).to(tl.float32) - shift[None, :], 0.0)
        one += value
        two += value * value
    tl.store(first + part * channels + column, tl.sum(one, 0))
    tl.store(second + part * channels + column, tl.sum(two, 0))


@triton.jit
def _statistics(x, first, second, weight, bias, running_mean, running_var, mean, inverse, scale, offset, parts, rows, channels, eps, momentum, BLOCK_PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Add the programs' sums; mean, 1/σ, the affine map they make with weight and bias, and the running statistics."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.zeros((BLOCK_PARTS, BLOCK), tl.float32)
    two = tl.zeros((BLOCK_PARTS, BLOCK), tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        at = part[:, None] * channels + column[None, :]
        one += tl.load(first + at, mask=(part < parts)[:, None], other=0.0)
        two += tl.load(second + at, mask=(part < parts)[:, None], other=0.0)
    moved = tl.sum(one, 0) / rows
    average = tl.load(x + column).to(tl.float32) + moved
    variance = tl.maximum(tl.sum(two, 0) / rows - moved * moved, 0.0)
    spread = 1.0 / tl.sqrt(variance + eps)
    factor = tl.load(weight + column) * spread
    tl.store(mean + column, average)
    tl.store(inverse + column, spread)
    tl.store(scale + column, factor)
    tl.store(offset + column, tl.load(bias + column) - average * factor)
    unbiased = variance * (rows / tl.maximum(rows - 1.0, 1.0))
    tl.store(running_mean + column, (1 - momentum) * tl.load(running_mean + column) + momentum * average)
    tl.store(running_var + column, (1 - momentum) * tl.load(running_var + column) + momentum * unbiased)


@triton.jit
def _apply(x, added, y, scale, offset, rows, channels, ADD: tl.constexpr, RELU: tl.constexpr, SIX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """y = relu(x·scale + offset + added), or relu6"""
    row, column = (
        tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS),
        tl.program_id(1) * BLOCK + tl.arange(0, BLOCK),
    )
    in_range = (row < rows)[:, None]
    at = row.to(tl.int64)[:, None] * channels + column[None, :]
    value = (
        tl.load(x + at, mask=in_range).to(tl.float32) * tl.load(scale + column)[None, :]
        + tl.load(offset + column)[None, :]
    )
    if ADD:
        value += tl.load(added + at, mask=in_range).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    if SIX:
        value = tl.minimum(value, 6.0)
    tl.store(y + at, value, mask=in_range)


@triton.jit
def _gradient_sums(dy, y, x, mean, inverse, first, second, rows, channels, per_program, RELU: tl.constexpr, SIX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Per program and channel: Σg and Σg·x̂, g the gradient behind the ReLU, x̂ the normalised input."""
    part, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    average, spread = tl.load(mean + column)[None, :], tl.load(inverse + column)[None, :]
    one = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    two = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for start in range(0, per_program, BLOCK_ROWS):
        row = part * per_program + start + tl.arange(0, BLOCK_ROWS)
        in_range = (row < rows)[:, None]
        at = row.to(tl.int64)[:, None] * channels + column[None, :]
        g = tl.load(dy + at, mask=in_range, other=0.0).to(tl.float32)
        if RELU:
            out = tl.load(y + at, mask=in_range, other=0.0).to(tl.float32)
            g = tl.where(out > 0.0, g, 0.0)
            if SIX:
                g = tl.where(out < 6.0, g, 0.0)
        one += g
        two += g * (tl.load(x + at, mask=in_range, other=0.0).to(tl.float32) - average) * spread
    tl.store(first + part * channels + column, tl.sum(one, 0))
    tl.store(second + part * channels + column, tl.sum(two, 0))


@triton.jit
def _gradient_totals(first, second, d_bias, d_weight, parts, channels, BLOCK_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the programs' sums: the gradients of bias and weight."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.zeros((BLOCK_PARTS, BLOCK), tl.float32)
    two = tl.zeros((BLOCK_PARTS, BLOCK), tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        at = part[:, None] * channels + column[None, :]
        one += tl.load(first + at, mask=(part < parts)[:, None], other=0.0)
        two += tl.load(second + at, mask=(part < parts)[:, None], other=0.0)
    tl.store(d_bias + column, tl.sum(one, 0))
    tl.store(d_weight + column, tl.sum(two, 0))


@triton.jit
def _gradient_apply(dy, y, x, mean, inverse, weight, d_bias, d_weight, dx, d_added, rows, channels, ADD: tl.constexpr, RELU: tl.constexpr, SIX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """dx = w/σ·(g − mean(g) − x̂·mean(g·x̂)); the shortcut's gradient is g."""
    row, column = (
        tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS),
        tl.program_id(1) * BLOCK + tl.arange(0, BLOCK),
    )
    in_range = (row < rows)[:, None]
    at = row.to(tl.int64)[:, None] * channels + column[None, :]
    g = tl.load(dy + at, mask=in_range, other=0.0).to(tl.float32)
    if RELU:
        out = tl.load(y + at, mask=in_range, other=0.0).to(tl.float32)
        g = tl.where(out > 0.0, g, 0.0)
        if SIX:
            g = tl.where(out < 6.0, g, 0.0)
    spread = tl.load(inverse + column)
    unit = (tl.load(x + at, mask=in_range, other=0.0).to(tl.float32) - tl.load(mean + column)[None, :]) * spread[
        None, :
    ]
    about = (tl.load(d_bias + column) / rows)[None, :] + unit * (tl.load(d_weight + column) / rows)[None, :]
    tl.store(dx + at, (tl.load(weight + column) * spread)[None, :] * (g - about), mask=in_range)
    if ADD:
        tl.store(d_added + at, g, mask=in_range)


def _block(channels: int, most: int = 64) -> int:
    """Channels a program handles: the largest power of two up to `most` that divides them."""
    return min(most, channels & -channels)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, eps: float, momentum: float, then: Rectifier) -> Tensor:  # fmt: skip
        channels, relu, six = x.shape[1], then is not None, then == "relu6"
        rows, block, few = x.numel() // channels, _block(channels), _block(channels, 16)
        columns = channels // block
        parts = max(1, min(PROGRAMS // columns, triton.cdiv(rows, ROWS)))
        per_program = triton.cdiv(rows, parts * ROWS) * ROWS  # whole blocks, so that no row is counted twice
        first, second = (torch.empty(parts, channels, device=x.device) for _ in range(2))
        mean, inverse, scale, offset = (torch.empty(channels, device=x.device) for _ in range(4))
        y = torch.empty_like(x)
        _sums[parts, columns](x, first, second, rows, channels, per_program, BLOCK_ROWS=ROWS, BLOCK=block, num_warps=8)
        _statistics[(channels // few,)](x, first, second, weight, bias, running_mean, running_var, mean, inverse, scale, offset, parts, rows, channels, eps, momentum, BLOCK_PARTS=64, BLOCK=few)  # fmt: skip
        tiles = (triton.cdiv(rows, ROWS), columns)
        _apply[tiles](x, x if added is None else added, y, scale, offset, rows, channels, ADD=added is not None, RELU=relu, SIX=six, BLOCK_ROWS=ROWS, BLOCK=block)  # fmt: skip
        ctx.save_for_backward(x, y if relu else x, weight, mean, inverse)
        ctx.relu, ctx.six, ctx.added, ctx.grid = relu, six, added is not None, (parts, columns, per_program)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, mean, inverse = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        channels = x.shape[1]
        rows, block, few = x.numel() // channels, _block(channels), _block(channels, 16)
        parts, columns, per_program = ctx.grid
        first, second = (torch.empty(parts, channels, device=x.device) for _ in range(2))
        d_bias, d_weight = (torch.empty(channels, device=x.device) for _ in range(2))
        dx = torch.empty_like(x)
        d_added = torch.empty_like(x) if ctx.added else dx
        _gradient_sums[parts, columns](dy, y, x, mean, inverse, first, second, rows, channels, per_program, RELU=ctx.relu, SIX=ctx.six, BLOCK_ROWS=ROWS, BLOCK=block, num_warps=8)  # fmt: skip
        _gradient_totals[(channels // few,)](
            first, second, d_bias, d_weight, parts, channels, BLOCK_PARTS=64, BLOCK=few
        )
        tiles = (triton.cdiv(rows, ROWS), columns)
        _gradient_apply[tiles](dy, y, x, mean, inverse, weight, d_bias, d_weight, dx, d_added, rows, channels, ADD=ctx.added, RELU=ctx.relu, SIX=ctx.six, BLOCK_ROWS=ROWS, BLOCK=block)  # fmt: skip
        return dx, d_added if ctx.added else None, d_weight, d_bias, None, None, None, None, None


def batch_norm(x: Tensor, norm: torch.nn.BatchNorm2d, added: Tensor | None, then: Rectifier) -> Tensor:
    """then(batch norm(x) + added) in training mode; x (n, channels, height, width) channels-last, running statistics moved."""
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    if added is not None:
        added = added.contiguous(memory_format=torch.channels_last)
    out: Tensor = _BatchNorm.apply(x, added, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps, norm.momentum, then)  # type: ignore[no-untyped-call]  # fmt: skip
    return out
