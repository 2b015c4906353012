"""Split: a shared base and personal heads.

The first blocks of the networks are averaged, the rest stays the client's own, and the clients' outputs are combined by another
rule. The number of shared blocks follows from the similarity of the label distributions:

    s = mean over pairs of clients of 1 − √JSD₂(p_i, p_j),  shared blocks = clip(round(s·N), 1, N − 1) of N

one number for all (`all`), one per client from its pairs (`each`), or from the client's own labels only (`client`:
s_k = entropy / log C), when only blocks that every client shares are averaged. Averaging invalidates batch-norm statistics, so
they can be measured again. The histograms are in the upload, so no exchange before training is needed.

A number is just so many blocks, whatever the labels are.

`declared`: the split was chosen before training and clients trained under it (the recipe's `share`); each declares in its upload how
many blocks it shared, and no histogram is needed any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor, nn

from oneround.config.parts import In, Needs, RulePart
from oneround.config.recipe import Local
from oneround.data import Images
from oneround.data.augment import preprocessing
from oneround.errors import RecipeError
from oneround.fusion.aligned_iffi import aligned
from oneround.fusion.average import average_weights
from oneround.fusion.base import EnsembleRule, Rule, SavedModel, expert_of, rules
from oneround.models.blocks import blocks
from oneround.models.inference import Ensemble, Expert, Experts, Inference, Single, to_inference
from oneround.models.prototype import PrototypeNet, build, network_from, with_own_statistics
from oneround.protocol import Broadcast, Upload
from oneround.protocol.messages import Shapes
from oneround.site import Site
from oneround.training.distillation import noise_images
from oneround.training.server_side import public_images
from oneround.training.shared_base import SHARED, number_of_blocks, shared_blocks

FROM_LABELS = ("all", "each", "client")
NOISE_IMAGES = 512  # to measure batch-norm statistics on


def _chosen(value: Any) -> Any:
    """Refuse what is neither a way to choose nor a number."""
    if value not in (*FROM_LABELS, "declared") and (type(value) is not int or value < 1):
        raise ValueError(f"must be {', '.join(FROM_LABELS)}, declared, or a number of blocks from 1 on")
    return value


@rules.register("split")
class Split(Rule):
    """Networks whose first blocks are averaged, more for similar label distributions, combined by another rule."""

    chosen: Annotated[str | int, BeforeValidator(_chosen)] = "all"
    """Number of shared blocks: one for all, one for each client, the client's own choice, what it trained under (`share`), or this number."""
    inner: Annotated[RulePart, In("fusion")] = Field(default="iffi", validate_default=True)
    """The rule that combines the clients' outputs: one that keeps networks and needs no statistics."""
    align: Literal["none", "match", "procrustes"] = "none"
    """Align the clients' feature spaces before they are combined: by permuting units, or by a rotation."""
    restate: Literal["none", "noise", "public"] = "noise"
    """Images to measure batch-norm statistics on again: none, noise, or the server's public ones."""

    @field_validator("inner")
    @classmethod
    def _inner_fits(cls, value: RulePart) -> RulePart:
        if not isinstance(value, EnsembleRule) or value.needs.sums or value.statistics(2, 2):
            raise ValueError(
                "must be a rule that keeps networks and asks for no statistics, such as iffi or logit-ensemble"
            )
        return value

    @property
    def needs(self) -> Needs:
        declared = self.chosen == "declared"
        counts = self.chosen in FROM_LABELS
        own = Needs(class_counts=counts, share=declared, public=self.restate == "public")
        return super().needs | self.inner.needs | own

    def statistics(self, classes: int, features: int) -> Shapes:
        return {SHARED: ()} if self.chosen == "declared" else {}

    def check_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        if SHARED in self.statistics(1, 1):
            declared = float(statistics[SHARED])
            if declared < 1 or declared != round(declared):
                raise ValueError(f"{SHARED} counts blocks, at least one; {declared:g} was declared")

    def check(self, broadcast: Broadcast, local: Local) -> None:
        total = number_of_blocks(broadcast.recipe, broadcast.shape[0])
        if isinstance(self.chosen, int) and self.chosen >= total:
            key = self.key(broadcast.recipe, "chosen")
            raise RecipeError(
                f"{key} = {self.chosen}: {broadcast.recipe.encoder.label} has {total} blocks, and the last one is never shared; "
                f"give 1 to {total - 1}"
            )

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        inner = rules.of(self.inner)
        assert isinstance(inner, EnsembleRule)
        experts: Experts = SplitExperts(self, uploads, broadcast, server)
        if self.align != "none":
            experts = aligned(experts, uploads, self.align)
        return Ensemble(inner.ready(uploads, broadcast, server), experts)

    def personal(
        self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site
    ) -> Iterator[tuple[str, Inference]]:
        experts = SplitExperts(self, uploads, broadcast, server)
        for upload, expert in zip(uploads, experts, strict=True):
            yield upload.client, Single(expert.net)

    def restore(self, saved: SavedModel) -> Inference:
        return rules.of(self.inner).restore(saved)


class SplitExperts:
    """Clients' networks with a common base, built one at a time."""

    def __init__(self, rule: Split, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> None:
        self.uploads, self.broadcast, self.device = uploads, broadcast, server.device
        with torch.device("meta"):
            self.blocks = blocks(build(broadcast.recipe.encoder, broadcast.shape[0], broadcast.classes))
        self.shared = _shared(rule, uploads, len(self.blocks))
        self.images = _images(rule, broadcast, server)
        self.means = self._means()

    def __iter__(self) -> Iterator[Expert]:
        for shared, upload in zip(self.shared, self.uploads, strict=True):
            base = {name: value for mean in self.means[:shared] for name, value in mean.items()}
            weights = upload.weights | base
            if self.images is not None:
                weights = self._restated(weights, self.images)
            yield expert_of(replace(upload, weights=weights), self.broadcast, self.device)

    def _restated(self, weights: dict[str, Tensor], images: Images) -> dict[str, Tensor]:
        """The weights with batch-norm statistics of these images."""
        net = network_from(self.broadcast.recipe.encoder, self.broadcast.shape[0], self.broadcast.classes, weights)
        restate(
            to_inference(with_own_statistics(net), self.device),
            images.batches(self.device, *preprocessing(self.broadcast.recipe)),
        )
        return net.weights()

    def _means(self) -> list[dict[str, Tensor]]:
        """For every shared block: its tensors averaged over the clients that share it."""
        means: list[dict[str, Tensor]] = []
        last: list[int] = []
        for depth in range(max(self.shared)):
            sharers = [number for number, shared in enumerate(self.shared) if shared > depth]
            if sharers != last:  # uploads are read from disk
                mean, last = average_weights([self.uploads[number] for number in sharers]), sharers
            means.append({name: mean[name] for name in self.blocks[depth]})
        return means


def _shared(rule: Split, uploads: Sequence[Upload], total: int) -> list[int]:
    """Number of blocks that each client shares, of so many."""
    if rule.chosen == "declared":
        return [min(int(upload.statistics[SHARED]), total - 1) for upload in uploads]
    if isinstance(rule.chosen, int):
        return [rule.chosen] * len(uploads)
    return shared_blocks(torch.stack([upload.class_counts for upload in uploads]), total, str(rule.chosen))


def _images(rule: Split, broadcast: Broadcast, server: Site) -> Images | None:
    if rule.restate == "noise":
        return noise_images(broadcast.shape, NOISE_IMAGES, broadcast.recipe.seeds.initialisation)
    return public_images(server, "fusion.split", ", or restate: noise") if rule.restate == "public" else None


@torch.no_grad()
def restate(net: PrototypeNet, batches: Iterator[Tensor]) -> None:
    """Measure batch-norm statistics again: the mean over these batches, weighted by their sizes."""
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
