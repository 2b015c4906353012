"""Smaller uploads: half precision, or int8 with a scale per channel. Encoded when packed, decoded when read.

int8, for tensors of two or more dimensions (others are few, and batch-norm statistics span orders of magnitude):
    s_c = max |w_c| / 127 over everything in channel c (the first dimension),  q = round(w / s_c),  w' = q · s_c
s_c is rounded up to 16 significant bits, so that q · s_c is exact in float32: decoded tensors encode to the same bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oneround.errors import ProtocolError
from oneround.models.prototype import Layout

SCALE = "scale."
Tensors = dict[str, Tensor]


def encode(tensors: Tensors, encoding: str) -> Tensors:
    """Encode tensors for an upload."""
    if encoding == "fp32":
        return tensors
    sent: Tensors = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            sent[name] = tensor
        elif encoding == "fp16":
            sent[name] = tensor.half()
            if torch.isfinite(tensor).all() and not torch.isfinite(sent[name]).all():
                most = tensor.abs().max()
                raise ProtocolError(
                    f"upload.encoding = fp16: {name} holds {most:.3g}, more than the 65,504 of fp16; use int8 or fp32"
                )
        elif tensor.dim() < 2:
            sent[name] = tensor
        else:
            sent[SCALE + name] = scale = _scale(tensor)
            sent[name] = (tensor / _per_channel(scale, tensor)).round().clamp(-127, 127).to(torch.int8)
    return sent


def decode(tensors: Tensors, encoding: str) -> Tensors:
    """Decode an upload's tensors to float32."""
    if encoding == "int8":
        return {
            name: value.float() * _per_channel(tensors[SCALE + name], value) if SCALE + name in tensors else value
            for name, value in tensors.items()
            if not name.startswith(SCALE)
        }
    return {name: value.float() if value.dtype == torch.float16 else value for name, value in tensors.items()}


def as_received(tensors: Tensors, encoding: str) -> Tensors:
    """The tensors as the receiver decodes them."""
    return decode(encode(tensors, encoding), encoding)


def _scale(tensor: Tensor) -> Tensor:
    """(channels,): 1 where a channel is all zeros."""
    most = tensor.abs().flatten(1).amax(1) if tensor.numel() else tensor.new_zeros(tensor.shape[0])
    scale = (most / 127).clamp(min=torch.finfo(torch.float32).tiny)
    up = ((scale.view(torch.int32) + 0xFF) & ~0xFF).view(torch.float32)
    return torch.where(most > 0, up, torch.ones_like(up))


def _per_channel(scale: Tensor, tensor: Tensor) -> Tensor:
    """(channels,) → (channels, 1, …), to multiply the tensor with."""
    return scale.reshape(-1, *[1] * (tensor.dim() - 1))


def encoded_layout(decoded: Layout, encoding: str) -> Layout:
    """Shapes and types of the encoded tensors, from those of the decoded ones."""
    sent: Layout = {}
    for name, (shape, dtype) in decoded.items():
        if dtype.is_floating_point and encoding == "fp16":
            dtype = torch.float16
        elif dtype.is_floating_point and encoding == "int8" and len(shape) > 1:
            sent[SCALE + name] = (shape[:1], torch.float32)
            dtype = torch.int8
        sent[name] = (shape, dtype)
    return sent


def layout_of(tensors: Tensors) -> Layout:
    """Shapes and types of tensors."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def bytes_of(layout: Layout) -> int:
    """Bytes of tensors of that layout."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
