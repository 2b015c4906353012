"""Base and head: share what is common, keep what is personal.

The first blocks of the networks are averaged, the rest stays the client's own, and the clients' answers are combined by another
rule. How many blocks are shared follows from how alike the label distributions are:
    s = mean over pairs of clients of 1 − √JSD₂(p_i, p_j),  shared blocks = clip(round(s·N), 1, N − 1) of N

for all alike (`all`), for each client from its pairs (`each`), or by the client from its own labels alone (`client`:
s_k = entropy / log C), when only blocks that every client shares are averaged. Averaging breaks what followed it: batch-norm
statistics can be measured anew. The histograms are in the upload, so no exchange before training is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from oneround.data import Images
from oneround.errors import RecipeError
from oneround.fusion.aligned import Turned
from oneround.fusion.average import average_weights
from oneround.fusion.rule import EnsembleRule, Rule, expert_of, rules
from oneround.learning.alignment import label_entropy
from oneround.learning.distillation import noise_images
from oneround.models import Ensemble, Expert, Inference, Single
from oneround.models.blocks import blocks
from oneround.models.inference import Experts
from oneround.models.prototype import PrototypeNet, build
from oneround.parts import In, Part, slot
from oneround.protocol import Broadcast, Upload
from oneround.protocol.model import preprocessing
from oneround.recipe import Federated
from oneround.site import Site

MADE_UP = 512  # noise images to measure batch-norm statistics on


@rules.register("split")
class Split(Rule):
    """Networks whose first blocks are averaged, as many as the clients' labels are alike, combined by another rule."""

    chosen: Literal["all", "each", "client"] = "all"
    """How many blocks are shared: one number for all, one for each client, or the client's own choice."""
    inner: Annotated[Part, In("fusion")] = Field(default="iffi", validate_default=True)
    """The rule that combines the clients' answers: one that keeps networks and asks for no statistics."""
    align: Literal["none", "match", "procrustes"] = "none"
    """Bring the clients' feature spaces together before they are combined: by reordering units, or by a rotation."""
    restate: Literal["none", "noise", "public"] = "noise"
    """What batch-norm statistics are measured on anew: nothing, made-up images, or the server's."""

    @field_validator("inner")
    @classmethod
    def _inner_fits(cls, value: Part) -> Part:
        if not isinstance(value, EnsembleRule) or value.needs_sums or value.statistics(2, 2):
            known = [kind for kind in slot("fusion").kinds if _fits(kind)]
            raise ValueError(
                f"must be a rule that keeps networks and asks for no statistics ({', '.join(sorted(known))})"
            )
        return value

    @property
    def needs_counts(self) -> bool:
        return True

    @property
    def needs_public(self) -> bool:
        return self.restate == "public"

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        inner = rules.of(self.inner)
        assert isinstance(inner, EnsembleRule)
        experts: Experts = SplitExperts(self, uploads, broadcast, server)
        return Ensemble(inner, experts if self.align == "none" else Turned(experts, uploads, self.align))

    def personal(
        self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site
    ) -> Iterator[tuple[str, Inference]]:
        experts = SplitExperts(self, uploads, broadcast, server)
        for upload, expert in zip(uploads, experts, strict=True):
            yield upload.client, Single(expert.net)

    def restore(
        self, shards: Sequence[dict[str, Tensor]], recipe: Federated, channels: int, classes: int, streamed: bool
    ) -> Inference:
        return rules.of(self.inner).restore(shards, recipe, channels, classes, streamed)


def _fits(kind: str) -> bool:
    rule = slot("fusion").parse(kind) if kind != "split" else None
    return isinstance(rule, EnsembleRule) and not rule.needs_sums and not rule.statistics(2, 2)


def similarity(counts: Tensor) -> Tensor:
    """1 − √JSD₂ of every pair of label distributions; counts (clients, classes) → (clients, clients)."""
    shares = counts.double() / counts.sum(1, keepdim=True)
    middle = (shares[:, None] + shares) / 2
    to_middle = (torch.xlogy(shares[:, None], shares[:, None]) - torch.xlogy(shares[:, None], middle)).sum(2)
    divergence = (to_middle + to_middle.T) / 2 / torch.log(torch.tensor(2.0))
    return 1 - divergence.clamp(min=0, max=1).sqrt()


def shared_blocks(counts: Tensor, total: int, chosen: str) -> list[int]:
    """How many of `total` blocks each client shares; counts (clients, classes)."""
    clients = len(counts)
    if chosen == "client":
        alike = torch.tensor([label_entropy(mine) for mine in counts])
    elif clients == 1:
        alike = torch.ones(1)
    else:
        others = ~torch.eye(clients, dtype=torch.bool)
        pairs = similarity(counts)
        alike = torch.stack([pairs[number][others[number]].mean() for number in range(clients)])
    if chosen == "all":
        alike = alike.mean().expand(clients)
    shared = [min(max(round(float(each) * total), 1), total - 1) for each in alike]
    return [min(shared)] * clients if chosen == "client" else shared


class SplitExperts:
    """Clients' networks with a common base, built one at a time."""

    def __init__(self, rule: Split, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> None:
        self.rule, self.uploads, self.broadcast, self.server = rule, uploads, broadcast, server
        encoder = broadcast.recipe.model.encoder
        assert encoder is not None
        with torch.device("meta"):
            self.blocks = blocks(build(encoder, broadcast.shape[0], broadcast.classes))
        counts = torch.stack([upload.class_counts for upload in uploads])
        self.shared = shared_blocks(counts, len(self.blocks), rule.chosen)
        self.images = _images(rule, broadcast, server)
        self.means = self._means()

    def __len__(self) -> int:
        return len(self.uploads)

    def __iter__(self) -> Iterator[Expert]:
        for shared, upload in zip(self.shared, self.uploads, strict=True):
            base = {name: value for mean in self.means[:shared] for name, value in mean.items()}
            weights = {
                name: value.clone() for name, value in (upload.weights | base).items()
            }  # uploads stay as they are
            merged = replace(upload, weights=weights)
            if self.images is None:
                yield expert_of(merged, self.broadcast, self.server.device)
                continue
            net = expert_of(merged, self.broadcast, self.server.device).net
            restate(net, self.images.batches(self.server.device, *preprocessing(self.broadcast.recipe)))
            yield expert_of(replace(merged, weights=net.weights()), self.broadcast, self.server.device)

    def _means(self) -> list[dict[str, Tensor]]:
        """Of every block that somebody shares: its tensors averaged over all clients who do."""
        means: list[dict[str, Tensor]] = []
        last: list[int] = []
        for depth in range(max(self.shared)):
            sharers = [number for number, shared in enumerate(self.shared) if shared > depth]
            if sharers != last:
                mean, last = average_weights([self.uploads[number] for number in sharers]), sharers
            means.append({name: mean[name] for name in self.blocks[depth]})
        return means


def _images(rule: Split, broadcast: Broadcast, server: Site) -> Images | None:
    if rule.restate == "noise":
        return noise_images(broadcast.shape, MADE_UP, broadcast.recipe.seeds.initialisation)
    if rule.restate == "public" and (server.data is None or len(server.data) == 0):
        raise RecipeError("fusion.split: the server has no public images; set public, or restate: noise")
    return server.data if rule.restate == "public" else None


@torch.no_grad()
def restate(net: PrototypeNet, batches: Iterator[Tensor]) -> None:
    """Measure batch-norm statistics anew: the mean over these batches, each counted by its images."""
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    net.train()
    total = 0
    for images in batches:
        total += len(images)
        for norm in norms:
            norm.momentum = len(images) / total
        net.encoder(images)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    net.eval()
