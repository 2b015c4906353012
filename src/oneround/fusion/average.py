"""Parameter averaging: FedAvg's last step (McMahan et al., 2017) done once.

Every tensor is averaged with the clients' sample counts as weights, batch-norm means and variances included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from oneround.config.parts import Needs
from oneround.fusion.base import Rule, SavedModel, rules
from oneround.models.inference import Inference, Single, to_inference
from oneround.models.prototype import network_from
from oneround.protocol import Broadcast, Upload
from oneround.site import Site


@rules.register("average")
class Average(Rule):
    """One network whose parameters and batch-norm statistics are the sample-weighted means of the clients'."""

    makes_network: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs(network=True)

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        return single(average_weights(uploads), broadcast, server)

    def restore(self, saved: SavedModel) -> Inference:
        return saved.network(saved.recipe.encoder)


def single(
    weights: dict[str, Tensor], broadcast: Broadcast, server: Site, facts: Mapping[str, Any] | None = None
) -> Single:
    """A network of the clients' architecture with these weights, ready for inference; `facts`: about its rule, for the log."""
    net = network_from(broadcast.recipe.encoder, broadcast.shape[0], broadcast.classes, weights)
    return to_inference(Single(net, facts), server.device)


def average_weights(uploads: Sequence[Upload]) -> dict[str, Tensor]:
    """Σ n_k W_k / Σ n_k in float64, one upload in memory at a time; whole-number tensors (batch counters) are rounded."""
    sums: dict[str, Tensor] = {}
    types: dict[str, torch.dtype] = {}
    samples = 0
    for upload in uploads:
        samples += upload.samples
        for name, value in upload.weights.items():
            types[name] = value.dtype
            sums[name] = sums.get(name, 0) + value.double() * upload.samples
    mean = {name: value / samples for name, value in sums.items()}
    return {
        name: (value if types[name].is_floating_point else value.round()).to(types[name])
        for name, value in mean.items()
    }
