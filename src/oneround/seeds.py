"""Random generators, derived from their purpose.

Every draw comes from a generator named by (seed, client, epoch, purpose), so results do not depend on the order in which
clients run or on how many run at once. Generators live on the CPU, so a CPU and a GPU use the same shuffles and crops.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose; different purposes give independent streams."""
    text = "/".join([str(seed), *(str(part) for part in purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose: `generator(recipe.seeds.training, "client_003", epoch, "shuffle")`."""
    return torch.Generator().manual_seed(derive(seed, *purpose))
