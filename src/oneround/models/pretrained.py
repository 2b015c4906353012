"""Pretrained weights from a file: read, compared with the network, then loaded."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from oneround.errors import ProtocolError
from oneround.models import PrototypeNet

HEAD = ("prototypes", "bias")


def load_weights(path: Path, net: PrototypeNet, key: str, *, whole: bool = False) -> None:
    """Load a safetensors file into the network: a whole network or, unless `whole`, an encoder (`encoder.` is optional)."""
    try:
        loaded = safetensors.torch.load(path.read_bytes())
    except Exception as error:  # the library raises several kinds
        raise ProtocolError(f"local.{key} = {path}: not a readable safetensors file ({error})") from None
    loaded = {
        name.removeprefix("weights."): value for name, value in loaded.items() if not name.startswith("statistics.")
    }
    if not any(name.startswith("encoder.") for name in loaded):
        loaded = {name if name in HEAD else f"encoder.{name}": value for name, value in loaded.items()}
    expected = net.state_dict()
    for name in sorted(loaded.keys() | {name for name in expected if whole or name not in HEAD}):
        problem = _mismatch(name, loaded.get(name), expected.get(name))
        if problem is not None:
            raise ProtocolError(f"local.{key} = {path}: {problem}")
    net.load_state_dict(loaded, strict=False)


def _mismatch(name: str, loaded: Tensor | None, expected: Tensor | None) -> str | None:
    """Why a tensor of the file cannot become the network's."""
    if loaded is None:
        return f"tensor {name} is missing"
    if expected is None:
        return f"tensor {name} is not part of this encoder"
    if loaded.shape != expected.shape:
        return f"{name} is {tuple(loaded.shape)}, this encoder has {tuple(expected.shape)}"
    if loaded.is_floating_point() != expected.is_floating_point():
        return f"{name} is {loaded.dtype}, this encoder has {expected.dtype}; save it as it was trained"
    if not torch.isfinite(loaded).all():
        return f"{name} holds values that are not finite"
    return None
