"""Randomness."""

from __future__ import annotations

import torch

from oneround.seeds import derive, generator


def test_randomness_belongs_to_its_purpose() -> None:
    drawn = {
        tuple(torch.rand(3, generator=generator(1, *who)).tolist())
        for who in [("a", 1), ("a", 2), ("b", 1), ("a", "1", "x")]
    }
    assert len(drawn) == 4
    assert torch.equal(torch.rand(3, generator=generator(1, "a", 1)), torch.rand(3, generator=generator(1, "a", 1)))
    assert derive(1, "a") != derive(2, "a") and 0 <= derive(1, "a") < 2**63
