"""The first convolution as kernels, interpreted on the CPU, against PyTorch."""

from __future__ import annotations

from interpreter import interpreted


def test_the_kernels_compute_what_pytorch_does() -> None:
    table = interpreted("stem")
    assert len(table) == 3
    assert max(error for errors in table.values() for error in errors.values()) < 2e-4
