"""What a fusion rule is: uploads → an inference module, and the statistics it wants clients to send along.

A rule is a pure function of the uploads, so every rule is scored on the same uploads without retraining.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from oneround.models import Ensemble, Expert, Inference
from oneround.models.inference import Combine, Seen, Totals, placed
from oneround.models.prototype import filled
from oneround.parts import Part, Slot
from oneround.protocol import Broadcast, Upload
from oneround.protocol.messages import Shapes
from oneround.recipe import Federated, Local
from oneround.seeds import generator
from oneround.site import Site


class Rule(Part):
    """A way to turn uploads into one model."""

    needs_network: ClassVar[bool] = True
    """Whether clients must have trained networks."""
    needs_prototypes: ClassVar[bool] = True
    """Whether it compares features with prototypes, which a network with a linear head does not have."""
    between_rounds: ClassVar[bool] = False
    """Whether it needs what the server keeps from round to round, so that uploads alone do not tell its outcome."""
    continues: ClassVar[bool] = False
    """Whether it makes a network of the clients' own kind, which a next round can start from."""

    @property
    def needs_sums(self) -> bool:
        """Whether clients must have sent sums of fixed features."""
        return False

    @property
    def needs_counts(self) -> bool:
        """Whether it goes by the sites' class counts, so that it means nothing where they are hidden."""
        return False

    @property
    def reveals(self) -> str:
        """What its statistics tell of a site's data, in words, things apart by "; "; nothing if it asks for none."""
        return ""

    @property
    def needs_public(self) -> bool:
        """Whether the server must hold images of its own."""
        return False

    def statistics(self, classes: int, features: int) -> Shapes:
        """Names and shapes of the float32 statistics every client must upload for this rule."""
        return {}

    def measure(self, unit: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        """Client side: those statistics, from the unit features (n, features) of the client's own images."""
        return {}

    def judge(self, logits: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        """Client side: statistics of how well its network answers on images it held back (else on those it trained on)."""
        return {}

    def key(self, recipe: Federated, option: str) -> str:
        """What a recipe calls this option of the rule."""
        place = recipe.fusion.index(self) if self in recipe.fusion else self.kind
        return f"fusion.{place}.{option}"

    def check(self, broadcast: Broadcast, local: Local) -> None:
        """Server side, before anything is trained: refuse options that do not fit the network or what lies here."""

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        """Server side: the model, on the server's device. Rules may use the images the server holds itself."""
        raise NotImplementedError

    def personal(
        self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site
    ) -> Iterator[tuple[str, Inference]]:
        """The model each client would go on with itself, by client, for rules that make one."""
        return iter(())

    def restore(
        self, shards: Sequence[dict[str, Tensor]], recipe: Federated, channels: int, classes: int, streamed: bool
    ) -> Inference:
        """The model again, from the tensors it was saved with."""
        raise NotImplementedError


rules: Slot[Rule] = Slot("fusion", Rule, default="iffi")


class EnsembleRule(Rule):
    """A rule that keeps every client's network and combines what they see."""

    def ready(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Combine:
        """What does the combining: this rule itself, unless it has to know more than its options first."""
        return self

    def begin(self, images: Tensor) -> Totals | None:
        """What to start from, before any client's view of a batch is folded in."""
        return None

    def add(self, totals: Totals | None, seen: Seen) -> Totals:
        """Fold one client's view of a batch into the running totals."""
        raise NotImplementedError

    def scores(self, totals: Totals) -> Tensor:
        """Totals → scores (n, classes) whose softmax are class probabilities."""
        raise NotImplementedError

    def fuse(self, uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Inference:
        return Ensemble(self.ready(uploads, broadcast, server), UploadExperts(uploads, broadcast, server.device))

    def restore(
        self, shards: Sequence[dict[str, Tensor]], recipe: Federated, channels: int, classes: int, streamed: bool
    ) -> Inference:
        return Ensemble(self, restored_experts(shards, recipe, channels, classes, streamed))


def restored_experts(
    shards: Sequence[dict[str, Tensor]], recipe: Federated, channels: int, classes: int, streamed: bool
) -> StreamedExperts | list[Expert]:
    """Saved experts again: all of them, or read one at a time."""

    def build(tensors: dict[str, Tensor]) -> Expert:
        encoder = recipe.model.encoder
        assert encoder is not None
        weights = {name.removeprefix("net."): value for name, value in tensors.items() if name.startswith("net.")}
        statistics = {
            name.removeprefix("statistic_"): value for name, value in tensors.items() if name.startswith("statistic_")
        }
        net = filled(encoder, channels, classes, weights)
        expert = Expert(net, tensors["samples"], tensors["class_counts"], statistics)
        expert.load_state_dict(tensors)
        return expert.eval().requires_grad_(False)

    experts = StreamedExperts(shards, build)
    return experts if streamed else list(experts)


class StreamedExperts:
    """Experts built one at a time from what is on disk; a second look builds them again."""

    def __init__(self, sources: Sequence[dict[str, Tensor]], build: Callable[[dict[str, Tensor]], Expert]) -> None:
        self.sources, self.build = sources, build

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[Expert]:
        for source in self.sources:
            yield self.build(source)


class UploadExperts:
    """The experts in a sequence of uploads, one in memory at a time."""

    def __init__(self, uploads: Sequence[Upload], broadcast: Broadcast, device: torch.device) -> None:
        self.uploads, self.broadcast, self.device = uploads, broadcast, device

    def __len__(self) -> int:
        return len(self.uploads)

    def __iter__(self) -> Iterator[Expert]:
        for upload in self.uploads:
            yield expert_of(upload, self.broadcast, self.device)


@torch.no_grad()
def expert_of(upload: Upload, broadcast: Broadcast, device: torch.device) -> Expert:
    """A client's network ready to see images, with its answer to a noise image that is the same for all."""
    encoder = broadcast.recipe.model.encoder
    assert encoder is not None
    net = filled(encoder, broadcast.shape[0], broadcast.classes, upload.weights)
    expert = placed(Expert(net, torch.tensor(upload.samples), upload.class_counts, upload.statistics), device)
    noise = torch.randn(1, *broadcast.shape, generator=generator(broadcast.recipe.seeds.initialisation, "noise image"))
    expert.noise_feature.copy_(expert.net.encoder(noise.to(device))[0])
    return expert
