"""Batch norm, an added shortcut and ReLU or ReLU6 in one pass over the data, forward and backward, as Triton kernels.

Outside its convolutions a ResNet's training step is memory-bound: as separate operations, batch norm, addition and ReLU read and
write every activation about sixteen times, and PyTorch's own statistics kernel for channels-last bf16 is slow. Here it is eight
passes, and twelve with a shortcut, without compiling the whole network: what the ReLU cut is computed again instead of read, and where
two layers use the output, their gradients are added on the way. Used by `normalise` (models/norm.py) where it applies; results are
bit-reproducible (no atomics).

Every tensor is viewed as rows × channels, the layout of channels-last memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oneround.kernels import launch

PROGRAMS = 1056  # programs that share a reduction over rows: eight for each of an H200's 132 multiprocessors
MOST_PARTS = 1024  # a power of two: what one program adds at once
ROWS = 64  # rows a program takes at a time
STAGES = 3  # of them on their way at once in a reduction, to hide the memory's latency


@triton.jit(do_not_specialize=["rows", "per_program"])
def _sums(
    x, first, second, rows, channels, per_program, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Per program and channel: Σ(x − s) and Σ(x − s)², s the first row's value (a shift that avoids cancellation)."""
    part, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(x + column).to(tl.float32)
    one = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    two = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for start in tl.range(0, per_program, BLOCK_ROWS, num_stages=STAGES):
        row = part * per_program + start + tl.arange(0, BLOCK_ROWS)
        in_range = (row < rows)[:, None]
        at = row.to(tl.int64)[:, None] * channels + column[None, :]
        value = tl.where(in_range, tl.load(x + at, mask=in_range, other=0.0).to(tl.float32) - shift[None, :], 0.0)
        one += value
        two += value * value
    tl.store(first + column * tl.num_programs(0) + part, tl.sum(one, 0))
    tl.store(second + column * tl.num_programs(0) + part, tl.sum(two, 0))


@triton.jit
def _total(sums, column, parts, PARTS: tl.constexpr):
    """The programs' sums of these channels, added: all at once, to wait for memory once."""
    part = tl.arange(0, PARTS)
    return tl.sum(tl.load(sums + column[:, None] * parts + part[None, :], mask=(part < parts)[None, :], other=0.0), 1)


@triton.jit(do_not_specialize=["parts", "rows", "counters"])
def _statistics(x, first, second, weight, bias, running_mean, running_var, batches, counters, mean, inverse, scale, offset, parts, rows, eps, momentum, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Mean, 1/σ, the affine map they make with weight and bias, the running statistics, and the counts of batches."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    moved = _total(first, column, parts, PARTS) / rows
    average = tl.load(x + column).to(tl.float32) + moved
    squares = _total(second, column, parts, PARTS) / rows
    variance = tl.maximum(squares - moved * moved, 0.0)
    spread = 1.0 / tl.sqrt(variance + eps)
    factor = tl.load(weight + column) * spread
    tl.store(mean + column, average)
    tl.store(inverse + column, spread)
    tl.store(scale + column, factor)
    tl.store(offset + column, tl.load(bias + column) - average * factor)
    unbiased = variance * (rows / tl.maximum(rows - 1.0, 1.0))
    tl.store(running_mean + column, (1 - momentum) * tl.load(running_mean + column) + momentum * average)
    tl.store(running_var + column, (1 - momentum) * tl.load(running_var + column) + momentum * unbiased)
    counted = column < counters  # one; of clients trained together, one each
    tl.store(batches + column, tl.load(batches + column, mask=counted, other=0) + 1, mask=counted)


@triton.jit(do_not_specialize=["rows"])
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


@triton.jit(do_not_specialize=["rows", "per_program", "height", "width"])
def _gradient_sums(dy, dz, y, x, mean, inverse, scale, offset, g_out, first, second, rows, channels, per_program, height, width, TWO: tl.constexpr, THIN: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, RELU: tl.constexpr, SIX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Per program and channel: Σg and Σg·x̂, g the gradient behind the ReLU, x̂ the normalised input.

    TWO: the gradient is dy + dz. THIN: dz has every second pixel only. ADD: there is a shortcut, so the ReLU's output y is read.
    KEEP: g is written.
    """
    part, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    average, spread = tl.load(mean + column)[None, :], tl.load(inverse + column)[None, :]
    factor, shift = tl.load(scale + column)[None, :], tl.load(offset + column)[None, :]
    one = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    two = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for start in tl.range(0, per_program, BLOCK_ROWS, num_stages=STAGES):
        row = part * per_program + start + tl.arange(0, BLOCK_ROWS)
        in_range = (row < rows)[:, None]
        at = row.to(tl.int64)[:, None] * channels + column[None, :]
        value = tl.load(x + at, mask=in_range, other=0.0).to(tl.float32)
        g = tl.load(dy + at, mask=in_range, other=0.0).to(tl.float32)
        if TWO:
            g += tl.load(dz + at, mask=in_range, other=0.0).to(tl.float32)
        if THIN:
            line, pixel = row // width, row % width
            image, line = line // height, line % height
            kept = (row < rows) & (line % 2 == 0) & (pixel % 2 == 0)
            from_row = (image * ((height + 1) // 2) + line // 2) * ((width + 1) // 2) + pixel // 2
            from_at = from_row.to(tl.int64)[:, None] * channels + column[None, :]
            g += tl.load(dz + from_at, mask=kept[:, None], other=0.0).to(tl.float32)
        if RELU:
            if ADD:
                out = tl.load(y + at, mask=in_range, other=0.0).to(tl.float32)
            else:
                out = (value * factor + shift).to(x.dtype.element_ty).to(tl.float32)
            g = tl.where(out > 0.0, g, 0.0)
            if SIX:
                g = tl.where(out < 6.0, g, 0.0)
        if KEEP:
            g = g.to(x.dtype.element_ty)
            tl.store(g_out + at, g, mask=in_range)
            g = g.to(tl.float32)
        one += g
        two += g * (value - average) * spread
    tl.store(first + column * tl.num_programs(0) + part, tl.sum(one, 0))
    tl.store(second + column * tl.num_programs(0) + part, tl.sum(two, 0))


@triton.jit(do_not_specialize=["parts"])
def _gradient_totals(first, second, d_bias, d_weight, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The gradients of bias and weight."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(d_bias + column, _total(first, column, parts, PARTS))
    tl.store(d_weight + column, _total(second, column, parts, PARTS))


@triton.jit(do_not_specialize=["rows"])
def _gradient_apply(g, x, mean, inverse, scale, offset, d_bias, d_weight, dx, rows, channels, RELU: tl.constexpr, SIX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """dx = w/σ·(g − mean(g) − x̂·mean(g·x̂)); RELU: g is the gradient before the ReLU."""
    row, column = (
        tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS),
        tl.program_id(1) * BLOCK + tl.arange(0, BLOCK),
    )
    in_range = (row < rows)[:, None]
    at = row.to(tl.int64)[:, None] * channels + column[None, :]
    value = tl.load(x + at, mask=in_range, other=0.0).to(tl.float32)
    gradient = tl.load(g + at, mask=in_range, other=0.0).to(tl.float32)
    factor = tl.load(scale + column)[None, :]
    if RELU:
        out = (value * factor + tl.load(offset + column)[None, :]).to(x.dtype.element_ty).to(tl.float32)
        gradient = tl.where(out > 0.0, gradient, 0.0)
        if SIX:
            gradient = tl.where(out < 6.0, gradient, 0.0)
    unit = (value - tl.load(mean + column)[None, :]) * tl.load(inverse + column)[None, :]
    about = (tl.load(d_bias + column) / rows)[None, :] + unit * (tl.load(d_weight + column) / rows)[None, :]
    tl.store(dx + at, factor * (gradient - about), mask=in_range)


@triton.jit(do_not_specialize=["rows", "height", "width"])
def _pack(x, y, rows, height, width, channels, image_stride, row_stride, pixel_stride, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, column = (
        tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS),
        tl.program_id(1) * BLOCK + tl.arange(0, BLOCK),
    )
    image, line, pixel = row // (height * width), row // width % height, row % width
    source = image.to(tl.int64) * image_stride + line * row_stride + pixel * pixel_stride
    in_range = (row < rows)[:, None]
    value = tl.load(x + source[:, None] + column[None, :], mask=in_range)
    tl.store(y + row.to(tl.int64)[:, None] * channels + column[None, :], value, mask=in_range)


class _Packed(torch.autograd.Function):
    """Every second pixel, side by side in memory: PyTorch's own copy reaches a quarter of the memory's bandwidth."""

    @staticmethod
    def forward(_ctx: Any, thin: Tensor) -> Tensor:
        n, channels, height, width = thin.shape
        y = torch.empty(thin.shape, dtype=thin.dtype, device=thin.device, memory_format=torch.channels_last)
        rows, block = n * height * width, _block(channels)
        image_stride, _, row_stride, pixel_stride = thin.stride()
        launch(_pack, (triton.cdiv(rows, ROWS), channels // block), thin, y, rows, height, width, channels, image_stride, row_stride, pixel_stride, BLOCK_ROWS=ROWS, BLOCK=block)  # fmt: skip
        return y

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def pack(thin: Tensor) -> Tensor:
    """What `batch_norm` gave as every second pixel, as a convolution reads it."""
    out: Tensor = _Packed.apply(thin)  # type: ignore[no-untyped-call]
    return out


def _block(channels: int, most: int = 64) -> int:
    """Channels a program handles: the largest power of two up to `most` that divides them."""
    return min(most, channels & -channels)


class _Grid(NamedTuple):
    """How a reduction over rows is shared among programs."""

    parts: int
    columns: int
    per_program: int
    """Whole blocks of rows, so that no row is counted twice."""
    block: int

    @classmethod
    def of(cls, rows: int, channels: int) -> _Grid:
        block = _block(channels)
        most = max(1, min(PROGRAMS // (channels // block), MOST_PARTS, triton.cdiv(rows, ROWS)))
        per_program = triton.cdiv(rows, most * ROWS) * ROWS
        return cls(triton.cdiv(rows, per_program), channels // block, per_program, block)

    def totals(self, channels: int) -> tuple[tuple[int], dict[str, int]]:
        """The programs that add the sums, and their blocks."""
        few = _block(channels, 4)
        return (channels // few,), {"PARTS": MOST_PARTS, "BLOCK": few}


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, norm: torch.nn.BatchNorm2d, then: str | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        channels, relu, six = x.shape[1], then is not None, then == "relu6"
        rows, counts = x.numel() // channels, norm.num_batches_tracked
        assert counts is not None
        grid = parts, columns, per_program, block = _Grid.of(rows, channels)
        first, second = (torch.empty(channels, parts, device=x.device) for _ in range(2))
        mean, inverse, scale, offset = (torch.empty(channels, device=x.device) for _ in range(4))
        y = torch.empty_like(x)
        programs, blocks = grid.totals(channels)
        launch(
            _sums,
            (parts, columns),
            x,
            first,
            second,
            rows,
            channels,
            per_program,
            BLOCK_ROWS=ROWS,
            BLOCK=block,
            STAGES=STAGES,
        )
        launch(_statistics, programs, x, first, second, weight, bias, norm.running_mean, norm.running_var, counts, counts.numel(), mean, inverse, scale, offset, parts, rows, norm.eps, norm.momentum, **blocks)  # fmt: skip
        tiles = (triton.cdiv(rows, ROWS), columns)
        launch(_apply, tiles, x, x if added is None else added, y, scale, offset, rows, channels, ADD=added is not None, RELU=relu, SIX=six, BLOCK_ROWS=ROWS, BLOCK=block)  # fmt: skip
        read_again = relu and added is not None
        ctx.save_for_backward(x, y if read_again else None, mean, inverse, scale, offset)
        ctx.relu, ctx.six, ctx.added, ctx.grid = relu, six, added is not None, grid
        ctx.set_materialize_grads(False)
        # Detached, since a view knows its base: what `normalise` notes on these would keep them alive for ever.
        return y, y.detach(), y[:, :, ::2, ::2].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        full, thin = [each for each in gradients[:2] if each is not None], gradients[2]
        if thin is not None and len(full) != 1:  # no network here uses the output so
            spread = torch.zeros_like(ctx.saved_tensors[0])
            spread[:, :, ::2, ::2] = thin
            full, thin = [*full, spread], None
        if len(full) > 2:
            full = [full[0], full[1] + full[2]]
        uses = [*full, *([] if thin is None else [thin])]
        dy, dz = (each.contiguous(memory_format=torch.channels_last) for each in (uses[0], uses[-1]))
        x, y, mean, inverse, scale, offset = ctx.saved_tensors
        channels = x.shape[1]
        rows = x.numel() // channels
        parts, columns, per_program, block = ctx.grid
        first, second = (torch.empty(channels, parts, device=x.device) for _ in range(2))
        d_bias, d_weight = (torch.empty(channels, device=x.device) for _ in range(2))
        dx = torch.empty_like(x)
        keep = ctx.added or len(uses) > 1
        g = torch.empty_like(x) if keep else dy
        programs, blocks = ctx.grid.totals(channels)
        launch(_gradient_sums, (parts, columns), dy, dz, x if y is None else y, x, mean, inverse, scale, offset, g, first, second, rows, channels, per_program, *x.shape[2:], TWO=len(full) > 1, THIN=thin is not None, ADD=y is not None, KEEP=keep, RELU=ctx.relu, SIX=ctx.six, BLOCK_ROWS=ROWS, BLOCK=block, STAGES=STAGES)  # fmt: skip
        launch(_gradient_totals, programs, first, second, d_bias, d_weight, parts, **blocks)
        tiles = (triton.cdiv(rows, ROWS), columns)
        launch(_gradient_apply, tiles, g, x, mean, inverse, scale, offset, d_bias, d_weight, dx, rows, channels, RELU=ctx.relu and not keep, SIX=ctx.six, BLOCK_ROWS=ROWS, BLOCK=block)  # fmt: skip
        return dx, g if ctx.added else None, d_weight, d_bias, None, None


def batch_norm(x: Tensor, norm: torch.nn.BatchNorm2d, added: Tensor | None, then: str | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """then(batch norm(x) + added) in training mode, twice the same, and every second pixel of it, for a layer that reads no others.

    Gradients of two layers that use the output are then added in one pass. x (n, channels, height, width) channels-last; running
    statistics are moved.
    """
    if added is not None:
        added = added.contiguous(memory_format=torch.channels_last)
    out: tuple[Tensor, Tensor, Tensor] = _BatchNorm.apply(x, added, norm.weight, norm.bias, norm, then)  # type: ignore[no-untyped-call]
    return out
