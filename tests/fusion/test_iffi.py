"""IFFI against its formula."""

from __future__ import annotations

import numpy as np

from oracle import Oracle


def test_iffi(oracle: Oracle) -> None:
    total = sum(oracle.n)
    fused = sum(n / total * f for n, f in zip(oracle.n, oracle.f, strict=True))
    fused /= np.linalg.norm(fused, axis=1, keepdims=True)
    assert np.abs(oracle.scores("iffi") - fused @ np.mean(oracle.p, 0).T).max() < 1e-4
