"""Supervised contrastive loss of a batch against itself, forward and backward, as Triton kernels around two matrix products.

As separate operations it is some thirty small kernels over the matrix of similarities, and its gradient as many. Here a program takes a
row of the matrix; the gradient uses that the matrix is symmetric. Used by `SupervisedContrastive` (training/contrastive.py), which has
the formula; results are bit-reproducible (no atomics).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oneround.kernels import launch

MOST_ANCHORS = 4096  # a row of so many similarities is in one program's registers


@triton.jit
def _rows(cosine, labels, losses, totals, positives, temperature, n, BLOCK: tl.constexpr):
    """Per anchor: its loss, the log of its denominator and its number of positives."""
    anchor, other = tl.program_id(0), tl.arange(0, BLOCK)
    compared = (other < n) & (other != anchor)
    similarity = tl.load(cosine + anchor.to(tl.int64) * n + other, mask=compared, other=-float("inf")) / temperature
    largest = tl.max(similarity, 0)
    total = largest + tl.log(tl.sum(tl.exp(similarity - largest), 0))
    positive = compared & (tl.load(labels + other, mask=compared, other=-1) == tl.load(labels + anchor))
    count = tl.sum(positive.to(tl.float32), 0)
    mean = tl.sum(tl.where(positive, similarity, 0.0), 0) / tl.maximum(count, 1.0)
    tl.store(losses + anchor, tl.where(count > 0, total - mean, 0.0))
    tl.store(totals + anchor, total)
    tl.store(positives + anchor, count)


@triton.jit
def _mean(losses, positives, loss, anchors, n, BLOCK: tl.constexpr):
    """The mean loss over the anchors that have a positive, and their number."""
    at = tl.arange(0, BLOCK)
    counted = (tl.load(positives + at, mask=at < n, other=0.0) > 0).to(tl.float32)
    number = tl.maximum(tl.sum(counted, 0), 1.0)
    tl.store(loss, tl.sum(tl.load(losses + at, mask=at < n, other=0.0), 0) / number)
    tl.store(anchors, number)


@triton.jit
def _gradient(cosine, labels, totals, positives, anchors, d_loss, gradient, temperature, n, BLOCK: tl.constexpr):
    """A row of D + Dᵀ, D the gradient of the matrix of cosines."""
    anchor, other = tl.program_id(0), tl.arange(0, BLOCK)
    compared = (other < n) & (other != anchor)
    row = anchor.to(tl.int64) * n + other
    similarity = tl.load(cosine + row, mask=compared, other=0.0) / temperature
    own, theirs = tl.load(positives + anchor), tl.load(positives + other, mask=compared, other=0.0)
    positive = compared & (tl.load(labels + other, mask=compared, other=-1) == tl.load(labels + anchor))
    # Where two anchors are of one class, both have a positive.
    one = tl.exp(similarity - tl.load(totals + anchor)) - tl.where(positive, 1.0 / tl.maximum(own, 1.0), 0.0)
    two = tl.exp(similarity - tl.load(totals + other, mask=compared, other=0.0))
    two -= tl.where(positive, 1.0 / tl.maximum(theirs, 1.0), 0.0)
    both = tl.where(own > 0, one, 0.0) + tl.where(theirs > 0, two, 0.0)
    factor = tl.load(d_loss) / (tl.load(anchors) * temperature)
    tl.store(gradient + row, tl.where(compared, factor * both, 0.0), mask=other < n)


class _SupervisedContrastive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: Tensor, labels: Tensor, temperature: float) -> Tensor:
        n = len(unit)
        cosine, labels = unit @ unit.T, labels.contiguous()
        losses, totals, positives = (torch.empty(n, device=unit.device) for _ in range(3))
        loss, anchors = (torch.empty((), device=unit.device) for _ in range(2))
        block = triton.next_power_of_2(n)
        launch(_rows, (n,), cosine, labels, losses, totals, positives, temperature, n, BLOCK=block)
        launch(_mean, (1,), losses, positives, loss, anchors, n, BLOCK=block)
        ctx.save_for_backward(unit, cosine, labels, totals, positives, anchors)
        ctx.temperature = temperature
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        unit, cosine, labels, totals, positives, anchors = ctx.saved_tensors
        n, d_loss = len(unit), gradients[0].contiguous()
        gradient = torch.empty_like(cosine)
        launch(_gradient, (n,), cosine, labels, totals, positives, anchors, d_loss, gradient, ctx.temperature, n, BLOCK=triton.next_power_of_2(n))  # fmt: skip
        return gradient @ unit, None, None


def supervised_contrastive(unit: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The mean loss over the anchors that have a positive; unit (n, features) fp32, labels (n,)."""
    out: Tensor = _SupervisedContrastive.apply(unit, labels, temperature)  # type: ignore[no-untyped-call]
    return out
