"""Batches of random unit features, to compute losses on."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from oneround.training import Batch


def random_batch(
    n: int, classes: int, seed: int, features: int = 24, dtype: torch.dtype = torch.float32, **more: Any
) -> Batch:
    """Unit features (n, features), labels (n,) and prototypes (classes, features)."""
    random = torch.Generator().manual_seed(seed)
    unit = F.normalize(torch.randn(n, features, generator=random, dtype=dtype), dim=1)
    labels = torch.randint(0, classes, (n,), generator=random)
    return Batch(unit, labels, torch.randn(classes, features, generator=random, dtype=dtype), **more)
