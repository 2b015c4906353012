"""A rehearsal: kernels are compiled, each variant once, on other threads, and none is launched."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from oneround import kernels


class Kernel:
    """As Triton's: `kernel[grid](…)` launches, `warmup` compiles."""

    def __init__(self, error: Exception | None = None) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self.error = error

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launched.append((grid, *arguments))

    def warmup(self, *kinds: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.threads.add(threading.current_thread().name)
        time.sleep(0.05)
        self.compiled.append(kinds)
        if self.error:
            raise self.error


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> kernels._Rehearsal:
    fresh = kernels._Rehearsal()
    monkeypatch.setattr(kernels, "_rehearsal", fresh)
    return fresh


def test_variants_are_compiled_once_and_nothing_is_launched(rehearsal: kernels._Rehearsal) -> None:
    kernel, x = Kernel(), torch.zeros(3)

    def work() -> None:
        for n in (32, 48, 7, 1, 9):  # of 16, of 16, odd, one, odd
            kernels.launch(kernel, (n,), x, n, 0.5, BLOCK=64)
        kernels.launch(kernel, (1,), x.half(), 32, 0.5, BLOCK=64)
        kernels.launch(kernel, (1,), x, 32, 0.5, BLOCK=32)

    assert kernels.rehearse(work)
    assert not kernel.launched
    assert len(kernel.compiled) == 5
    assert {kinds[0] for kinds in kernel.compiled} == {torch.float32, torch.float16}
    assert len(kernel.threads) > 1 and all(name.startswith("compile") for name in kernel.threads)
    kernels.launch(kernel, (4,), x, 32)
    assert len(kernel.launched) == 1


def test_there_is_one_in_a_process(rehearsal: kernels._Rehearsal) -> None:
    done: list[int] = []
    assert kernels.rehearse(lambda: done.append(1))
    assert not kernels.rehearse(lambda: done.append(2))
    assert done == [1]


def test_what_cannot_be_compiled_or_does_not_fit_is_left_to_the_step(rehearsal: kernels._Rehearsal) -> None:
    broken = Kernel(ValueError("no such instruction"))

    def work() -> None:
        kernels.launch(broken, (1,), 3)
        raise torch.OutOfMemoryError

    assert kernels.rehearse(work)
    kernels.launch(broken, (1,), 3)
    assert len(broken.launched) == 1


def test_an_error_of_the_step_is_raised_and_kernels_are_launched_again(rehearsal: kernels._Rehearsal) -> None:
    def work() -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        kernels.rehearse(work)
    kernel = Kernel()
    kernels.launch(kernel, (1,), 3)
    assert len(kernel.launched) == 1
