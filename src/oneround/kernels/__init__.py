"""Triton kernels for a GPU: each computes, in fewer passes over memory, what is defined in PyTorch elsewhere.

Triton comes with PyTorch on Linux. Where it is missing, and on a CPU, nothing here is used. A module is imported when it is first needed.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch
from torch import Tensor


def usable(tensor: Tensor) -> bool:
    """Whether kernels can work on this tensor here; they cannot inside `torch.func.vmap`."""
    mapped: bool = torch._C._functorch.is_batchedtensor(tensor)
    return tensor.is_cuda and not mapped and _has_triton() and not torch.compiler.is_compiling()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
