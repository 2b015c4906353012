"""Weights from a file somebody gives: read, compared with the network they are for, and only then loaded."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from oneround.errors import ProtocolError
from oneround.models import PrototypeNet

HEAD = ("prototypes", "bias")


def start_from(path: Path, net: PrototypeNet, key: str, *, whole: bool = False) -> None:
    """Fill the network from a safetensors file: a whole network, or, unless it must be, an encoder alone (with or without `encoder.`)."""
    try:
        given = safetensors.torch.load(path.read_bytes())
    except Exception as error:  # the library raises several kinds
        raise ProtocolError(f"local.{key} = {path}: not a readable safetensors file ({error})") from None
    given = {
        name.removeprefix("weights."): value for name, value in given.items() if not name.startswith("statistics.")
    }
    if not any(name.startswith("encoder.") for name in given):
        given = {name if name in HEAD else f"encoder.{name}": value for name, value in given.items()}
    wanted = net.state_dict()
    for name in sorted(given.keys() | {name for name in wanted if whole or name not in HEAD}):
        if name not in given or name not in wanted:
            raise ProtocolError(
                f"local.{key} = {path}: tensor {name} is {'missing' if name in wanted else 'not part of this encoder'}"
            )
        if given[name].shape != wanted[name].shape:
            raise ProtocolError(
                f"local.{key} = {path}: {name} is {tuple(given[name].shape)}, this encoder has {tuple(wanted[name].shape)}"
            )
        if given[name].is_floating_point() != wanted[name].is_floating_point():
            raise ProtocolError(
                f"local.{key} = {path}: {name} is {given[name].dtype}, this encoder has {wanted[name].dtype}; save it as it was trained"
            )
        if given[name].is_floating_point() and not torch.isfinite(given[name]).all():
            raise ProtocolError(f"local.{key} = {path}: {name} holds values that are not finite")
    net.load_state_dict(given, strict=False)
