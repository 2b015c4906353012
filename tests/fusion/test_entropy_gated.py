"""The entropy gate against its formula."""

from __future__ import annotations

import numpy as np
import pytest

from oracle import Oracle, softmax


@pytest.mark.parametrize("sharpness", [0.0, 3.0])
def test_entropy_gate(oracle: Oracle, sharpness: float) -> None:
    p = [softmax(logits) for logits in oracle.logits]
    gates = np.stack([n * np.exp(-sharpness * -(q * np.log(q)).sum(1)) for n, q in zip(oracle.n, p, strict=True)])
    gates /= gates.sum(0)
    expected = sum(gates[k][:, None] * p[k] for k in range(3))
    assert np.abs(np.exp(oracle.scores({"kind": "entropy-gated", "sharpness": sharpness})) - expected).max() < 1e-5
