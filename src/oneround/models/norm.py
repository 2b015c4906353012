"""Norm, shortcut and rectifier after a convolution, in one call; batch norm on the statistics of test batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Rectifier = Literal["relu", "relu6"] | None


def normalise(norm: nn.Module, x: Tensor, added: Tensor | None = None, then: Rectifier = "relu") -> Tensor:
    """then(norm(x) + added); on a GPU, batch norm in training mode uses the fused kernels (fused.py)."""
    if x.is_cuda and _fits(norm, x) and not torch.compiler.is_compiling() and _has_triton():
        from oneround.models.fused import batch_norm

        assert isinstance(norm, nn.BatchNorm2d)
        return batch_norm(x, norm, added, then)
    out: Tensor = norm(x)
    if added is not None:
        out = out + added
    return out if then is None else F.relu(out) if then == "relu" else F.relu6(out)


def _fits(norm: nn.Module, x: Tensor) -> bool:
    """Whether the fused kernels cover this case."""
    return (
        isinstance(norm, nn.BatchNorm2d)
        and norm.training
        and norm.momentum is not None
        and x.shape[1] % 8 == 0
        and x.is_contiguous(memory_format=torch.channels_last)
    )


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Let batch norm normalise by the batch it sees within the context; running statistics are neither used nor changed."""
    norms = [each for each in module.modules() if isinstance(each, nn.BatchNorm2d)]
    kept = [(norm.running_mean, norm.running_var) for norm in norms]
    try:
        for norm in norms:
            norm.running_mean = norm.running_var = None
        yield
    finally:
        for norm, (mean, variance) in zip(norms, kept, strict=True):
            norm.running_mean, norm.running_var = mean, variance


def has_batch_norm(module: nn.Module) -> bool:
    """Whether `batch_statistics` makes a difference to a module."""
    return any(isinstance(each, nn.BatchNorm2d) for each in module.modules())
