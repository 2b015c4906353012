"""A shared base that clients train under: its number of blocks, and what holds it near the weights that all began with.

Clients average the first blocks of their networks without an exchange in between, so those must stay alike while they train apart:
their gradient gets + μ·(w − w₀), or is 0. How many blocks there are follows from the similarity of the label distributions:

    s = mean over pairs of clients of 1 − √JSD₂(p_i, p_j),  shared blocks = clip(round(s·N), 1, N − 1) of N

one number for all (`all`), one per client from its pairs (`each`), or from the client's own labels only (`client`:
s_k = entropy / log C).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from oneround.config.recipe import Federated
from oneround.config.sections import Share
from oneround.errors import RunError
from oneround.models.blocks import blocks
from oneround.models.prototype import PrototypeNet, meta_network
from oneround.protocol.messages import Broadcast
from oneround.training.alignment.aligner import label_entropy

SHARED = "shared_blocks"
"""Name of the statistic by which a client declares how many blocks it shared."""


def similarity(counts: Tensor) -> Tensor:
    """1 − √JSD₂ of every pair of label distributions; counts (clients, classes) → (clients, clients)."""
    shares = counts.double() / counts.sum(1, keepdim=True)
    middle = (shares[:, None] + shares) / 2
    to_middle = (torch.xlogy(shares[:, None], shares[:, None]) - torch.xlogy(shares[:, None], middle)).sum(2)
    divergence = (to_middle + to_middle.T) / 2 / torch.log(torch.tensor(2.0))
    return 1 - divergence.clamp(min=0, max=1).sqrt()


def own_choices(counts: Tensor, total: int) -> list[int]:
    """The number of shared blocks of `total` that each client chooses from its own labels; counts (clients, classes)."""
    return _clipped([label_entropy(own) for own in counts], total)


def shared_blocks(counts: Tensor, total: int, chosen: str) -> list[int]:
    """Number of shared blocks of `total` for each client; counts (clients, classes)."""
    clients = len(counts)
    if chosen == "client":
        return [min(own_choices(counts, total))] * clients
    if clients == 1:
        scores = torch.ones(1)
    else:
        others = ~torch.eye(clients, dtype=torch.bool)
        scores = similarity(counts)[others].view(clients, clients - 1).mean(1)
    if chosen == "all":
        scores = scores.mean().expand(clients)
    return _clipped(scores.tolist(), total)


def _clipped(scores: list[float], total: int) -> list[int]:
    return [min(max(round(score * total), 1), total - 1) for score in scores]


def number_of_blocks(recipe: Federated, channels: int) -> int:
    """Blocks of the recipe's network, the prototypes among them."""
    return len(blocks(meta_network(recipe.encoder, channels, 2, recipe.model.head)))


def depths_of(recipe: Federated, channels: int, histograms: Mapping[str, Tensor]) -> dict[str, int]:
    """The server's choice: client → number of shared blocks, from the class histograms that all sent."""
    assert recipe.share is not None
    counts, total = torch.stack(list(histograms.values())), number_of_blocks(recipe, channels)
    return dict(zip(histograms, shared_blocks(counts, total, recipe.share.chosen), strict=True))


def depth_of(broadcast: Broadcast, client: str, counts: Tensor) -> int | None:
    """Number of blocks that a client shares: the server's choice, or its own from its class counts; None without a split."""
    share = broadcast.recipe.share
    if share is None:
        return None
    if not share.surveyed:
        return own_choices(counts[None], number_of_blocks(broadcast.recipe, broadcast.shape[0]))[0]
    if client not in broadcast.depths:
        known = ", ".join(broadcast.depths) or "none"
        raise RunError(
            f"share: {client} sent no histogram before training, so no split was chosen for it (known: {known})"
        )
    return broadcast.depths[client]


class SharedBase:
    """Changes the gradients of a network's shared blocks; everything is at fixed addresses, as a recorded step needs it."""

    def __init__(self, net: PrototypeNet, share: Share) -> None:
        """Watch the gradients of a network from now on; `bind` says where its blocks are held, `begin` how many of them."""
        self.mask = torch.zeros(len(blocks(net)), device=net.prototypes.device)
        """(blocks,) 1 for the blocks that are shared, 0 for the others."""
        self.start = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
        of_block = {name: number for number, names in enumerate(blocks(net)) for name in names}
        for name, parameter in net.named_parameters():
            self._hold(parameter, self.start[name], self.mask[of_block[name]], share)

    def _hold(self, parameter: nn.Parameter, start: Tensor, mask: Tensor, share: Share) -> None:
        def frozen(gradient: Tensor) -> Tensor:
            return gradient * (1 - mask)

        def pulled(gradient: Tensor) -> Tensor:
            return gradient + share.strength * mask * (parameter.detach() - start)

        parameter.register_hook(frozen if share.hold == "frozen" else pulled)

    def bind(self, weights: dict[str, Tensor]) -> None:
        """The weights that all clients begin with."""
        for name, start in self.start.items():
            start.copy_(weights[name])

    def begin(self, depth: int) -> None:
        """Share so many blocks from now on."""
        self.mask[:depth] = 1
        self.mask[depth:] = 0
