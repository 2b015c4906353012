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
def _apply(x, added, y, scale, offset, added_scale, added_offset, rows, channels, ADD: tl.constexpr, NORMALISE_ADDED: tl.constexpr, RELU: tl.constexpr, SIX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """y = relu(x·scale + offset + added), or relu6; NORMALISE_ADDED: added has a scale and an offset of its own"""
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
        more = tl.load(added + at, mask=in_range).to(tl.float32)
        if NORMALISE_ADDED:
            more = more * tl.load(added_scale + column)[None, :] + tl.load(added_offset + column)[None, :]
        value += more
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

    @property
    def programs(self) -> tuple[int, int]:
        """Those that share the reduction."""
        return self.parts, self.columns

    def tiles(self, rows: int) -> tuple[int, int]:
        """The programs of a pass without a reduction."""
        return triton.cdiv(rows, ROWS), self.columns

    def totals(self, channels: int) -> tuple[tuple[int], dict[str, int]]:
        """The programs that add the sums, and their blocks."""
        few = _block(channels, 4)
        return (channels // few,), {"PARTS": MOST_PARTS, "BLOCK": few}


class _Normalised(NamedTuple):
    """A tensor with its statistics, and the affine map that they and a norm's weight and bias make."""

    x: Tensor
    mean: Tensor
    inverse: Tensor
    scale: Tensor
    offset: Tensor

    @classmethod
    def by(cls, norm: torch.nn.BatchNorm2d, x: Tensor, grid: _Grid) -> _Normalised:
        """Measure x; running statistics are moved."""
        channels, counts = x.shape[1], norm.num_batches_tracked
        assert counts is not None
        first, second = (torch.empty(channels, grid.parts, device=x.device) for _ in range(2))
        made = cls(x, *(torch.empty(channels, device=x.device) for _ in range(4)))
        rows = x.numel() // channels
        launch(_sums, grid.programs, x, first, second, rows, channels, grid.per_program, BLOCK_ROWS=ROWS, BLOCK=grid.block, STAGES=STAGES)  # fmt: skip
        programs, blocks = grid.totals(channels)
        launch(_statistics, programs, x, first, second, norm.weight, norm.bias, norm.running_mean, norm.running_var, counts, counts.numel(), *made[1:], grid.parts, rows, norm.eps, norm.momentum, **blocks)  # fmt: skip
        return made

    def gradients(self, uses: _Uses, y: Tensor | None, grid: _Grid, *, keep: bool, relu: bool, six: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Of x, weight and bias, and that before the rectifier. y: what to tell from where it cut; otherwise from x."""
        x, channels = self.x, self.x.shape[1]
        rows = x.numel() // channels
        first, second = (torch.empty(channels, grid.parts, device=x.device) for _ in range(2))
        d_bias, d_weight = (torch.empty(channels, device=x.device) for _ in range(2))
        dx = torch.empty_like(x)
        g = torch.empty_like(x) if keep else uses.one
        launch(_gradient_sums, grid.programs, uses.one, uses.two, x if y is None else y, *self, g, first, second, rows, channels, grid.per_program, *x.shape[2:], TWO=uses.number == 2 and not uses.thin, THIN=uses.thin, ADD=y is not None, KEEP=keep, RELU=relu, SIX=six, BLOCK_ROWS=ROWS, BLOCK=grid.block, STAGES=STAGES)  # fmt: skip
        programs, blocks = grid.totals(channels)
        launch(_gradient_totals, programs, first, second, d_bias, d_weight, grid.parts, **blocks)
        launch(_gradient_apply, grid.tiles(rows), g, *self, d_bias, d_weight, dx, rows, channels, RELU=relu and not keep, SIX=six, BLOCK_ROWS=ROWS, BLOCK=grid.block)  # fmt: skip
        return dx, d_weight, d_bias, g


class _Uses(NamedTuple):
    """The gradients of what layers have used: one, or two, of which the second may have every second pixel only."""

    one: Tensor
    two: Tensor
    number: int
    thin: bool

    @classmethod
    def of(cls, gradients: tuple[Tensor | None, ...], like: Tensor) -> _Uses:
        full, thin = [each for each in gradients[:2] if each is not None], gradients[2]
        if thin is not None and len(full) != 1:  # no network here uses the output so
            spread = torch.zeros_like(like)
            spread[:, :, ::2, ::2] = thin
            full, thin = [*full, spread], None
        if len(full) > 2:
            full = [full[0], full[1] + full[2]]
        uses = [*full, *([] if thin is None else [thin])]
        one, two = (each.contiguous(memory_format=torch.channels_last) for each in (uses[0], uses[-1]))
        return cls(one, two, len(uses), thin is not None)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, norm: torch.nn.BatchNorm2d, added_norm: torch.nn.BatchNorm2d | None, then: str | None, *_parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`_parameters`: weight and bias of the norms, which get gradients."""
        channels, relu, six = x.shape[1], then is not None, then == "relu6"
        rows = x.numel() // channels
        grid = _Grid.of(rows, channels)
        main = _Normalised.by(norm, x, grid)
        side = None if added is None or added_norm is None else _Normalised.by(added_norm, added, grid)
        y = torch.empty_like(x)
        launch(_apply, grid.tiles(rows), x, x if added is None else added, y, main.scale, main.offset, *(side or main)[3:], rows, channels, ADD=added is not None, NORMALISE_ADDED=side is not None, RELU=relu, SIX=six, BLOCK_ROWS=ROWS, BLOCK=grid.block)  # fmt: skip
        ctx.save_for_backward(*main, *(side or ()), *([y] if relu and added is not None else []))
        ctx.relu, ctx.six, ctx.added, ctx.side, ctx.grid = relu, six, added is not None, side is not None, grid
        ctx.set_materialize_grads(False)
        # Detached, since a view knows its base: what `normalise` notes on these would keep them alive for ever.
        return y, y.detach(), y[:, :, ::2, ::2].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, grid = ctx.saved_tensors, ctx.grid
        main, rest = _Normalised(*saved[:5]), saved[5:]
        side, rest = (_Normalised(*rest[:5]), rest[5:]) if ctx.side else (None, rest)
        uses = _Uses.of(gradients, main.x)
        dx, d_weight, d_bias, g = main.gradients(uses, rest[0] if rest else None, grid, keep=ctx.added or uses.number > 1, relu=ctx.relu, six=ctx.six)  # fmt: skip
        if side is None:
            return dx, g if ctx.added else None, None, None, None, d_weight, d_bias
        own = _Uses(g, g, 1, False)
        d_added, *of_side, _ = side.gradients(own, None, grid, keep=False, relu=False, six=False)
        return dx, d_added, None, None, None, d_weight, d_bias, *of_side


def batch_norm(x: Tensor, norm: torch.nn.BatchNorm2d, added: Tensor | None, then: str | None, added_norm: torch.nn.BatchNorm2d | None = None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """then(batch norm(x) + added) in training mode, twice the same, and every second pixel of it, for a layer that reads no others.

    Gradients of two layers that use the output are then added in one pass. x and added (n, channels, height, width) channels-last;
    `added_norm`: normalises added first. Running statistics are moved.
    """
    if added is not None:
        added = added.contiguous(memory_format=torch.channels_last)
    parameters = [
        parameter for each in (norm, added_norm) if each is not None for parameter in (each.weight, each.bias)
    ]
    out: tuple[Tensor, Tensor, Tensor] = _BatchNorm.apply(x, added, norm, added_norm, then, *parameters)  # type: ignore[no-untyped-call]
    return out
