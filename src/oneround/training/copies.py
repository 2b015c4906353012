"""Copies of many tensors at once: on a GPU, one operation for a hundred of them instead of one for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oneround.models.prototype import all_on_cpu


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each."""
    made = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    overwrite(made, tensors)
    return made


def fetched_later(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """What these tensors are now, on the CPU; from a GPU it is fetched when it is called for, perhaps by another thread."""
    if next(iter(tensors.values())).is_cpu:
        taken = all_on_cpu(tensors)
        return lambda: taken
    kept = copies(tensors)
    return lambda: fetched(kept)


def fetched(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU of tensors that nobody changes; other threads do not wait for them, as they would on the stream that all share."""
    device = next(iter(tensors.values())).device
    if device.type != "cuda":
        return all_on_cpu(tensors)
    own, shared = torch.cuda.Stream(device), torch.cuda.default_stream(device)
    own.wait_stream(shared)
    with torch.cuda.stream(own):
        return all_on_cpu(tensors)


@torch.no_grad()
def overwrite(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into the tensors of the same names, which stay where they are; there may be more values."""
    for dtype in {tensor.dtype for tensor in live.values()}:
        names = [name for name, tensor in live.items() if tensor.dtype == dtype]
        torch._foreach_copy_([live[name] for name in names], [values[name] for name in names])
