"""Informative IFFI against its formula."""

from __future__ import annotations

import numpy as np

from oracle import Oracle


def test_informative_iffi(oracle: Oracle) -> None:
    def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ b / np.linalg.norm(a, axis=1) / np.linalg.norm(b)

    w = np.stack([1 - cosine(f, e) for f, e in zip(oracle.f, oracle.noise, strict=True)])
    assert w.std(0).max() > 1e-3
    w /= w.sum(0)
    fused = sum(w[k][:, None] * oracle.f[k] for k in range(3))
    fused /= np.linalg.norm(fused, axis=1, keepdims=True)
    assert np.abs(oracle.scores("informative-iffi") - fused @ np.mean(oracle.p, 0).T).max() < 1e-4
