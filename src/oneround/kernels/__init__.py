"""Triton kernels for a GPU: each computes, in fewer passes over memory, what is defined in PyTorch elsewhere.

Triton comes with PyTorch on Linux. Where it is missing, and on a CPU, nothing here is used. A module is imported when it is first needed.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("oneround")
COMPILERS = 8  # threads


def usable(tensor: Tensor) -> bool:
    """Whether kernels can work on this tensor here; they cannot inside `torch.func.vmap`."""
    mapped: bool = torch._C._functorch.is_batchedtensor(tensor)
    return tensor.is_cuda and not mapped and _has_triton() and not torch.compiler.is_compiling()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel; in a rehearsal, have it compiled."""
    if _rehearsal.compiling is None:
        kernel[grid](*arguments, **options)
    else:
        _rehearsal.compile(kernel, grid, arguments, options)


def rehearse(work: Callable[[], None]) -> bool:
    """Do work whose results are thrown away; kernels are compiled on several threads meanwhile, and not launched.

    Once in a process, since a second network needs few other kernels. Returns whether it was done.
    """
    return _has_triton() and _rehearsal.hold(work)


class _Rehearsal:
    def __init__(self) -> None:
        self.compiling: dict[object, Future[None]] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._lock, self._held = threading.Lock(), False

    def hold(self, work: Callable[[], None]) -> bool:
        with self._lock:
            if self._held:
                return False
            self._held, self.compiling = True, {}
            try:
                with ThreadPoolExecutor(COMPILERS, "compile") as self._threads:
                    work()
            except torch.OutOfMemoryError:  # the step itself says so
                pass
            finally:
                compiled, self.compiling = self.compiling, None
            for each in compiled.values():
                if error := each.exception():
                    log.debug("a kernel was not compiled ahead: %s", error)
            return True

    def compile(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert self.compiling is not None and self._threads is not None
        kinds = tuple(each.dtype if isinstance(each, Tensor) else each for each in arguments)
        variant = kernel, tuple(map(_variant, kinds)), tuple(sorted(options.items()))
        if variant not in self.compiling:
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            self.compiling[variant] = self._threads.submit(_compile, kernel, grid, kinds, options, device)


def _variant(kind: Any) -> Any:
    """What Triton compiles a kernel apart for: an integer that is 1, and one that 16 divides."""
    return (kind == 1, kind % 16 == 0) if isinstance(kind, int) else kind


def _compile(kernel: Any, grid: tuple[int, ...], kinds: tuple[Any, ...], options: dict[str, Any], device: int | None) -> None:  # fmt: skip
    if device is not None:
        torch.cuda.set_device(device)
    compiled = kernel.warmup(*kinds, grid=grid, **options)
    getattr(compiled, "run", None)  # loads it, and compiles what launches it


_rehearsal = _Rehearsal()
