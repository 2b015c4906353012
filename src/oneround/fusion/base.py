"""The base classes of fusion rules: uploads → an inference module, and the statistics that clients upload for it.

A rule is a pure function of the uploads, so every rule is scored on the same uploads without retraining.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from oneround.config.parts import Needs, Part, RulePart, Slot
from oneround.config.recipe import Federated, Local
from oneround.models.inference import (
    TRANSDUCTIVE,
    Combine,
    Ensemble,
    Expert,
    ExpertOutput,
    Experts,
    Inference,
    Single,
    Totals,
    to_inference,
)
from oneround.models.prototype import network_from, with_own_statistics
from oneround.protocol.messages import Broadcast, Shapes, Upload, strip_prefix
from oneround.seeds import generator
from oneround.site import Site


class Rule(RulePart):
    """A fusion rule turns uploads into one model. By default it needs networks with prototypes."""

    @property
    def needs(self) -> Needs:
        return Needs(network=True, prototypes=True)

    def statistics(self, classes: int, features: int) -> Shapes:
        """Names and shapes of the float32 statistics every client must upload for this rule."""
        return {}

    def measure(self, unit: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        """Client side: those statistics, from the unit features (n, features) of the client's own images."""
        return {}

    def measure_raw(self, features: Tensor) -> dict[str, Tensor]:
        """Client side: those that need the features (n, features) of the client's own images with their lengths."""
        return {}

    def judge(self, logits: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        """Client side: statistics of its network's performance on its held-out images (else on its training images)."""
        return {}

    def check_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        """Server side, when an upload arrives: raise a ValueError for impossible statistics."""

    def key(self, recipe: Federated, option: str) -> str:
        """The recipe's key of this option of the rule."""
        part = recipe.fusion.index(self) if self in recipe.fusion else self.kind
        return f"fusion.{part}.{option}"

    def check(self, broadcast: Broadcast, local: Local) -> None:
        """Server side, before training: refuse options that do not fit the network or the server's files."""

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        """Server side: the model, on the server's device. Rules may use the server's own images."""
        raise NotImplementedError

    def personal(
        self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site
    ) -> Iterator[tuple[str, Inference]]:
        """Each client's personal model, by client, for rules that make one."""
        return iter(())

    def restore(self, saved: SavedModel) -> Inference:
        """Restore a saved model."""
        raise NotImplementedError


rules: Slot[Rule] = Slot("fusion", Rule, default="iffi")


class EnsembleRule(Rule):
    """A rule that keeps every client's network and combines their outputs."""

    @property
    def transductive(self) -> bool:
        """Whether its scores of an image depend on the images scored with it."""
        return False

    @property
    def label(self) -> str:
        """Its kind and options, and that its scores are transductive."""
        return super().label + (f", {TRANSDUCTIVE}" if self.transductive else "")

    def ready(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Combine:
        """The object that combines the clients' outputs; the rule itself unless it needs data from the uploads."""
        return self

    def begin(self, images: Tensor) -> Totals | None:
        """Initial totals of a batch, before any client's output is added; None for an empty start."""
        return None

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals:
        """Add one client's output on a batch to the running totals."""
        raise NotImplementedError

    def scores(self, totals: Totals) -> Tensor:
        """Totals → scores (n, classes) whose softmax are class probabilities."""
        raise NotImplementedError

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        return Ensemble(self.ready(uploads, broadcast, server), UploadExperts(uploads, broadcast, server.device))

    def restore(self, saved: SavedModel) -> Inference:
        return Ensemble(self, saved.experts())


S = TypeVar("S")


class LazyExperts(Generic[S]):
    """Experts built one at a time from their sources; every iteration builds them again."""

    def __init__(self, sources: Iterable[S], build: Callable[[S], Expert]) -> None:
        self.sources, self.build = sources, build

    def __iter__(self) -> Iterator[Expert]:
        return map(self.build, self.sources)


class UploadExperts(LazyExperts[Upload]):
    """The experts in a sequence of uploads, one in memory at a time."""

    def __init__(self, uploads: Sequence[Upload], broadcast: Broadcast, device: torch.device) -> None:
        super().__init__(uploads, lambda upload: expert_of(upload, broadcast, device))


@dataclass(frozen=True)
class SavedModel:
    """What a model is restored from."""

    shards: Sequence[Callable[[], dict[str, Tensor]]]
    """Readers of its files' tensors."""
    recipe: Federated
    channels: int
    classes: int
    streamed: bool = False
    """Whether to keep only one network in memory at a time."""

    def network(self, encoder: Part) -> Single:
        """The network of a model that has one."""
        net = network_from(encoder, self.channels, self.classes, self.shards[0]())
        return Single(net.eval().requires_grad_(False))

    def experts(self, first: int = 0) -> Experts:
        """The experts of an ensemble, from shard number `first` on."""
        experts = LazyExperts(self.shards[first:], self._expert)
        return experts if self.streamed else list(experts)

    def _expert(self, read: Callable[[], dict[str, Tensor]]) -> Expert:
        tensors = read()
        net = network_from(self.recipe.encoder, self.channels, self.classes, strip_prefix(tensors, "net"))
        statistics = {
            name.removeprefix("statistic_"): value for name, value in tensors.items() if name.startswith("statistic_")
        }
        expert = Expert(net, tensors["samples"], tensors["class_counts"], statistics)
        expert.load_state_dict(tensors)
        return expert.eval().requires_grad_(False)


@torch.no_grad()
def expert_of(upload: Upload, broadcast: Broadcast, device: torch.device) -> Expert:
    """A client's network ready for inference, with its feature of a noise image that is the same for all."""
    encoder = broadcast.recipe.encoder
    net = with_own_statistics(network_from(encoder, broadcast.shape[0], broadcast.classes, upload.weights))
    expert = to_inference(Expert(net, torch.tensor(upload.samples), upload.class_counts, upload.statistics), device)
    noise = torch.randn(1, *broadcast.shape, generator=generator(broadcast.recipe.seeds.initialisation, "noise image"))
    expert.noise_feature.copy_(expert.net.encoder(noise.to(device))[0])
    return expert
