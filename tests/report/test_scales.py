"""Scales end on round numbers."""

from __future__ import annotations

from oneround.report.scales import scale_for


def test_scales_end_on_round_numbers() -> None:
    assert scale_for([0.3, 9.2], 0, 100).ticks == [0, 2, 4, 6, 8, 10]
    assert scale_for([0.003, 900], 0, 100, log=True).ticks == [0.01, 0.1, 1, 10, 100, 1000]
    assert scale_for([3.0], 0, 100, log=True).takes(0.0) is False
