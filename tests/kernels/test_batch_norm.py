"""Batch norm, shortcut and rectifier as kernels, interpreted on the CPU, against PyTorch."""

from __future__ import annotations

from interpreter import interpreted


def test_the_kernels_compute_what_pytorch_does() -> None:
    table = interpreted("batch_norm")
    assert len(table) == 108
    for case, errors in table.items():
        limit = 6e-3 if "bfloat16" in case else 2e-4
        for name, error in errors.items():
            assert error < limit, (case, name, error)
