"""The logit ensemble against its formula."""

from __future__ import annotations

import numpy as np

from oracle import Oracle


def test_logit_ensemble(oracle: Oracle) -> None:
    expected = sum(n * logits for n, logits in zip(oracle.n, oracle.logits, strict=True)) / sum(oracle.n)
    assert np.abs(oracle.scores("logit-ensemble") - expected).max() < 1e-4
