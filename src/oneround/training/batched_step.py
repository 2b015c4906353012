"""One training step of several clients at once: their networks are one network of grouped convolutions.

Client k has channels k·C to (k+1)·C of every layer. A convolution has as many groups as clients, batch norm and group norm act on
each client's channels by themselves, so nothing flows between clients. After the encoder every tensor has a leading dimension of
clients: a term is written for one client's batch and mapped over all of them (`torch.func.vmap`), and the gradient of the sum of
all losses has every client's own gradient in its part. An operation per layer instead of one per layer and client is what it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from oneround.config.recipe import Federated
from oneround.models.encoders import MobileNet, ResNet, SmallConvNet
from oneround.models.prototype import PrototypeNet, meta_network, network_from
from oneround.protocol.messages import Broadcast, prefixed
from oneround.site import Site
from oneround.training import objective, trace
from oneround.training.step import ClientState, Losses, Stepper

CHANNEL_BY_CHANNEL = (SmallConvNet, ResNet, MobileNet)
"""Encoders that mix channels in convolutions only, and so can be grouped."""


def not_batchable(recipe: Federated, channels: int) -> str | None:
    """Why clients of this recipe cannot be trained as one network; None if they can."""
    if not recipe.trains:
        return "this recipe trains no network"
    if recipe.generator is not None:
        return "a generator is one client's"
    if recipe.companion is not None:
        return "a companion learns beside one client"
    if recipe.training.optimizer == "adam":
        return "training.optimizer = adam counts the steps of each client"
    if recipe.share is not None:
        return "share: how many blocks are held is each client's own"
    if type(meta_network(recipe.encoder, channels, 2, recipe.model.head).encoder) not in CHANNEL_BY_CHANNEL:
        return f"model.encoder = {recipe.encoder.kind} may mix channels outside of convolutions"
    parts: dict[str, object] = {f"objective.terms.{name}": term for name, term in recipe.objective.terms.items()}
    if recipe.alignment is not None:
        parts |= {"alignment.weight": recipe.alignment.weight, "alignment.guard": recipe.alignment.guard}
    for key, part in parts.items():
        if not type(part).__module__.startswith("oneround."):
            return f"{key} is a plug-in's, written for one client"
    return None


def group(module: nn.Module, clients: int) -> None:
    """Turn every layer below a module, in place, into the layers of so many clients side by side."""
    for name, layer in list(module.named_children()):
        if isinstance(layer, nn.Conv2d):
            layer.in_channels, layer.out_channels = clients * layer.in_channels, clients * layer.out_channels
            layer.groups *= clients
        elif isinstance(layer, nn.BatchNorm2d):
            layer.num_features *= clients
        elif isinstance(layer, nn.GroupNorm):
            layer.num_groups, layer.num_channels = clients * layer.num_groups, clients * layer.num_channels
        elif next(layer.children(), None) is not None:
            group(layer, clients)
            continue
        elif next(layer.parameters(), None) is not None or next(layer.buffers(), None) is not None:
            raise TypeError(f"{name}: a {type(layer).__name__} of several clients cannot be grouped")
        for key, parameter in list(layer.named_parameters(recurse=False)):
            setattr(layer, key, nn.Parameter(parameter.new_zeros(clients * len(parameter), *parameter.shape[1:])))
        for key, buffer in list(layer.named_buffers(recurse=False)):
            shape = (clients * len(buffer), *buffer.shape[1:]) if buffer.dim() else (clients,)
            setattr(layer, key, buffer.new_zeros(shape))


class BatchedStepper(Stepper):
    """The networks, the optimiser and the training step of several clients, each in its slot."""

    def __init__(self, broadcast: Broadcast, site: Site, clients: int, images: int) -> None:
        """`clients`: number of slots; `images`: of one client in a step, all views."""
        self.clients, self.images, self.lead = clients, images, (clients,)
        super().__init__(broadcast, site)
        self.shapes = {name: tuple(value.shape) for name, value in broadcast.weights.items()}
        state = self.net.state_dict()
        self.networks = {name: state[name].view(clients, *shape) for name, shape in self.shapes.items()}
        """Every client's weights and norm statistics by name; live."""
        self.slots = [Slot(self, number) for number in range(clients)]
        self._kept: list[tuple[Tensor, list[Tensor]]] = []

    def _build(self, broadcast: Broadcast) -> PrototypeNet:
        net = super()._build(broadcast)
        group(net.encoder, self.clients)
        net.prototypes = nn.Parameter(net.prototypes.new_zeros(self.clients, *net.prototypes.shape))
        if net.bias is not None:
            net.bias = nn.Parameter(net.bias.new_zeros(self.clients, *net.bias.shape))
        return net

    def _images_per_step(self) -> int:
        return self.clients * self.images

    def bind(self, broadcast: Broadcast) -> None:
        """Copy a broadcast's values into the buffers, its weights into every slot."""
        for name, value in broadcast.weights.items():
            self.networks[name].copy_(value.expand_as(self.networks[name]))
        self._bind_extras(broadcast)
        for stage in self.stages:
            stage.sums.zero_()  # the group before may have failed within an epoch
        self._kept.clear()

    # --- all clients: every tensor with a leading dimension of clients -----------------------------------------------------

    @property
    def learned(self) -> dict[str, Tensor]:
        alignment = self.aligner.live if self.aligner else {}
        return prefixed(net=self.networks, alignment=alignment, queue=self.queue.live if self.queue else {})

    @property
    def momentum(self) -> dict[str, Tensor]:
        shapes = self.shapes | dict.fromkeys(self.aligner.variables if self.aligner else {}, ())
        return {name: buffer.view(self.clients, *shapes[name]) for name, buffer in super().momentum.items()}

    def keep(self, slots: Sequence[int], *, batch: bool = False) -> None:
        """Remember these clients as they are: what further steps do to them is undone by `give_back`. `batch`: and their metrics and last batch."""
        if slots:
            index = torch.tensor(slots, device=self.device)
            self._kept.append((index, [tensor[index] for tensor in self._changing(batch)]))

    def give_back(self) -> None:
        """Undo what steps have done to kept clients."""
        for index, saved in self._kept:
            for tensor, value in zip(self._changing(len(saved) > len(self._changing(False))), saved, strict=True):
                tensor.index_copy_(0, index, value)
        self._kept.clear()

    @torch.no_grad()
    def _changing(self, batch: bool) -> list[Tensor]:
        """Every tensor that a step changes; `batch`: its results among them."""
        tensors = [*self.learned.values(), *self.momentum.values()]
        if self.aligner is not None:
            tensors.append(self.aligner.raw)
        if batch:
            assert self.last_batch is not None
            last = self.last_batch
            tensors += [each for each in (self.stage.sums.T, last.unit, last.labels, last.lengths) if each is not None]
        return tensors

    def all_means(self, steps: Sequence[int]) -> list[dict[str, float]]:
        """`means` of every client, which has made so many steps; waits for the device once."""
        assert self.last_batch is not None
        spreads = vmap(trace.spread)(self.last_batch.unit)
        totals = torch.tensor(steps, device=self.device)
        values = torch.cat([self.stage.sums / totals, spreads[None], *self._anchoring()]).T.tolist()
        self.stage.sums.zero_()
        return [dict(zip(self._measured, measured, strict=True)) for measured in values]

    def gradients_of(self, slot: int) -> dict[str, Any]:
        """`gradients` of one client."""
        assert self.last_batch is not None
        last = self.last_batch
        batch = _with_own(last, {name: value[slot] for name, value in _own(last).items()})
        distance = self.aligner.distance if self.aligner and self.stage.aligns else None
        return trace.gradients(self.stage.terms, batch, distance)

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _arranged(self, images: Tensor) -> Tensor:
        """(clients·n, channels, …) → (n, clients·channels, …)"""
        by_client = images.view(self.clients, -1, *images.shape[1:])
        together = by_client.permute(1, 3, 4, 0, 2).flatten(3).permute(0, 3, 1, 2)  # one copy, channels last
        return together.contiguous(memory_format=torch.channels_last)

    def _by_client(self, features: Tensor) -> Tensor:
        return features.view(len(features), self.clients, -1).transpose(0, 1)

    def _losses(self, batch: objective.Batch) -> Losses:
        def of_client(own: dict[str, Tensor]) -> Losses:
            return super(BatchedStepper, self)._losses(_with_own(batch, own))

        losses: Losses = vmap(of_client)(_own(batch))
        return losses

    def _clip(self) -> Tensor:
        """Every client's gradient by its own norm (clients,)."""
        clipped = [parameter.grad for parameter in self.clipped if parameter.grad is not None]
        gradients: list[Tensor] = [each.unflatten(0, (self.clients, -1)) for each in clipped]
        norms = [torch.linalg.vector_norm(each, dim=tuple(range(1, each.dim()))) for each in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        if self.training.clip_norm:
            factor = (self.training.clip_norm / (norm + 1e-6)).clamp(max=1)
            for each in gradients:
                each.mul_(factor.view(-1, *[1] * (each.dim() - 1)))
        return norm


OWN = ("unit", "labels", "prototypes", "prior", "lengths", "bias")
"""Fields of a batch that belong to each client; the bank and the reference are everybody's."""


def _own(batch: objective.Batch) -> dict[str, Tensor]:
    """Every tensor of a batch that has a leading dimension of clients."""
    own = {name: getattr(batch, name) for name in OWN if getattr(batch, name) is not None}
    if batch.queue is not None:
        own |= {"queue.unit": batch.queue.unit, "queue.labels": batch.queue.labels}
    return own


def _with_own(batch: objective.Batch, own: dict[str, Tensor]) -> objective.Batch:
    """The batch of one client, which has these of its tensors."""
    queue = None if batch.queue is None else objective.Features(own["queue.unit"], own["queue.labels"])
    fields: dict[str, Any] = {name: value for name, value in own.items() if name in OWN}
    return replace(batch, **fields, queue=queue)


class Slot(ClientState):
    """One client of a batched step; its tensors are parts of the step's own."""

    def __init__(self, stepper: BatchedStepper, number: int) -> None:
        weights = {name: value[number] for name, value in stepper.networks.items()}
        self.net: PrototypeNet = network_from(stepper.recipe.encoder, stepper.shape[0], stepper.prior.shape[1], weights)
        self.prior = stepper.prior[number]
        self.aligner = stepper.aligner.client(number) if stepper.aligner else None
        self.queue = stepper.queue.client(number) if stepper.queue else None
        self._momentum = {name: buffer[number] for name, buffer in stepper.momentum.items()}

    def begin_client(self, counts: Tensor) -> None:
        super().begin_client(counts)
        self.prior.copy_(objective.log_prior(counts))

    @property
    def momentum(self) -> dict[str, Tensor]:
        return self._momentum
