"""Parameter averaging: FedAvg's last step (McMahan et al., 2017) done once.

Every tensor is averaged with the clients' sample counts as weights, batch-norm means and variances included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from oneround.fusion.rule import Rule, rules
from oneround.models import Inference, Single
from oneround.models.inference import placed
from oneround.models.prototype import filled
from oneround.protocol import Broadcast, Upload
from oneround.recipe import Federated
from oneround.site import Site


@rules.register("average")
class Average(Rule):
    """One network whose parameters and batch-norm statistics are the sample-weighted means of the clients'."""

    needs_prototypes: ClassVar[bool] = False
    continues: ClassVar[bool] = True

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        return single(average_weights(uploads), broadcast, server)

    def restore(
        self, shards: Sequence[dict[str, Tensor]], recipe: Federated, channels: int, classes: int, streamed: bool
    ) -> Inference:
        assert recipe.model.encoder is not None
        net = filled(recipe.model.encoder, channels, classes, shards[0])
        return Single(net.eval().requires_grad_(False))


def single(
    weights: dict[str, Tensor], broadcast: Broadcast, server: Site, told: Mapping[str, Any] | None = None
) -> Single:
    """A network of the clients' kind with these weights, ready to answer; `told`: what its rule has to tell."""
    assert broadcast.recipe.model.encoder is not None
    net = filled(broadcast.recipe.model.encoder, broadcast.shape[0], broadcast.classes, weights)
    return placed(Single(net, told), server.device)


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
