"""The network every client trains: an encoder f and one trainable prototype per class, P (classes, features)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneround.config.parts import Part
from oneround.models.encoders import Encoder, encoders
from oneround.seeds import derive, generator


class PrototypeNet(nn.Module):
    """Unit features z = f(x)/‖f(x)‖ compared with prototypes: logits z·Pᵀ. With a linear head: f(x)·Pᵀ + b."""

    bias: nn.Parameter | None

    def __init__(self, encoder: Encoder, classes: int, head: str = "prototypes") -> None:
        super().__init__()
        self.encoder = encoder
        self.prototypes = nn.Parameter(torch.zeros(classes, encoder.features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(classes)) if head == "linear" else None)

    def forward(self, images: Tensor) -> Tensor:
        """(n, channels, height, width) normalised → logits (n, classes)"""
        return self.classify(self.encoder(images))

    def classify(self, features: Tensor) -> Tensor:
        """The encoder's features (n, features) → logits (n, classes)"""
        if self.bias is not None:
            return features @ self.prototypes.T + self.bias
        return F.normalize(features, dim=1) @ self.prototypes.T

    @property
    def size(self) -> int:
        """Number of values in a message: parameters and norm statistics."""
        return sum(tensor.numel() for tensor in self.state_dict().values())

    def weights(self) -> dict[str, Tensor]:
        """A copy of parameters and norm statistics on the CPU, as a message carries them."""
        return all_on_cpu(self.state_dict())


def on_cpu(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, for messages and files."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def all_on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`on_cpu` of each; from a GPU, all of one type travel at once."""
    copies: dict[str, Tensor] = {}
    for kind in {(tensor.device, tensor.dtype) for tensor in tensors.values()}:
        members = {name: each.detach() for name, each in tensors.items() if (each.device, each.dtype) == kind}
        if kind[0].type == "cuda":
            flat = torch.cat([each.flatten() for each in members.values()]).cpu()
            parts = flat.split([each.numel() for each in members.values()])
            copies |= {name: part.view(each.shape) for (name, each), part in zip(members.items(), parts, strict=True)}
        else:
            copies |= {name: on_cpu(each) for name, each in members.items()}
    return {name: copies[name] for name in tensors}


def build(part: Part, channels: int, classes: int, head: str = "prototypes") -> PrototypeNet:
    """The network with its layers' default random weights."""
    return PrototypeNet(encoders.of(part).build(channels), classes, head)


Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of tensors, by name."""


@lru_cache(maxsize=32)
def meta_network(part: Part, channels: int, classes: int, head: str) -> PrototypeNet:
    """The network that `build` makes, on the meta device: shapes and types without values."""
    with torch.device("meta"):
        return build(part, channels, classes, head)


def network_from(part: Part, channels: int, classes: int, weights: dict[str, Tensor]) -> PrototypeNet:
    """The network that has these tensors themselves, built on the meta device, so no random weights are drawn first."""
    with torch.device("meta"):
        net = build(part, channels, classes, "linear" if "bias" in weights else "prototypes")
    net.load_state_dict(weights, assign=True)
    return net


def with_own_statistics(net: PrototypeNet) -> PrototypeNet:
    """The network with copies of its norm statistics, which training mode changes in place; parameters stay as they are."""
    for module in net.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.clone())
    return net


def initialise(part: Part, channels: int, classes: int, seed: int, head: str = "prototypes") -> PrototypeNet:
    """A fresh network: the encoder by its layers' own rules, prototypes N(0, 1), a linear head's matrix within ±1/√features.

    It depends only on the seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "encoder"))
        net = build(part, channels, classes, head)
    if net.bias is None:
        nn.init.normal_(net.prototypes, generator=generator(seed, "prototypes"))
    else:
        bound = net.encoder.features**-0.5
        nn.init.uniform_(net.prototypes, -bound, bound, generator=generator(seed, "prototypes"))
    return net
