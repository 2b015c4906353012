"""The network every client trains: an encoder f and one trainable prototype per class, P (classes, features)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneround.models.encoders import Encoder, encoders
from oneround.parts import Part
from oneround.seeds import derive, generator


class PrototypeNet(nn.Module):
    """Unit features z = f(x)/‖f(x)‖ compared with prototypes: logits z·Pᵀ."""

    def __init__(self, encoder: Encoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.prototypes = nn.Parameter(torch.zeros(classes, encoder.features))

    def forward(self, images: Tensor) -> Tensor:
        """(n, channels, height, width) normalised → logits (n, classes)"""
        return F.normalize(self.encoder(images), dim=1) @ self.prototypes.T

    @property
    def size(self) -> int:
        """How many numbers a message carries of it: parameters and norm statistics."""
        return sum(tensor.numel() for tensor in self.state_dict().values())

    def weights(self) -> dict[str, Tensor]:
        """All that a message carries of the network: a copy of parameters and norm statistics on the CPU."""
        return {name: on_cpu(value) for name, value in self.state_dict().items()}


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy as messages and files hold it."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def build(part: Part, channels: int, classes: int) -> PrototypeNet:
    """The network with its layers' own random weights."""
    return PrototypeNet(encoders.of(part).build(channels), classes)


def filled(part: Part, channels: int, classes: int, weights: dict[str, Tensor]) -> PrototypeNet:
    """The network with weights that came in a message; no time is spent on random ones first."""
    with torch.device("meta"):
        net = build(part, channels, classes)
    net.load_state_dict(weights, assign=True)
    return net


def initialise(part: Part, channels: int, classes: int, seed: int) -> PrototypeNet:
    """A fresh network: the encoder by its layers' own rules, prototypes N(0, 1); depends on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "encoder"))
        net = build(part, channels, classes)
    nn.init.normal_(net.prototypes, generator=generator(seed, "prototypes"))
    return net
