"""Inference modules of a global model: one network, or an ensemble of clients' networks combined by a rule.

An ensemble runs its experts one after another and folds each one's output into running totals, so it works the same
with all experts in memory (a saved model in use) or with one at a time read from disk (scoring two hundred uploads).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneround.config.recipe import Federated
from oneround.config.sections import SMALLEST_BATCH
from oneround.data import Images
from oneround.errors import DataError, RecipeError
from oneround.models.norm import has_batch_norm
from oneround.models.prototype import PrototypeNet, meta_network

TRANSDUCTIVE = "transductive"
"""What a score is called that depends on which images are scored together."""
Totals = dict[str, Tensor]
M = TypeVar("M", bound=nn.Module)


def to_inference(module: M, device: torch.device) -> M:
    """Move a module to the device for inference: evaluation mode, no gradients, channels-last on a GPU."""
    layout = torch.channels_last if device.type == "cuda" else torch.preserve_format
    return module.to(device, memory_format=layout).eval().requires_grad_(False)  # type: ignore[call-overload,no-any-return]


class Inference(nn.Module):
    """Normalised images → scores (n, classes); larger is likelier."""

    def predict(self, images: Images, device: torch.device, mean: float, std: float) -> Tensor:
        """Its scores on a whole set, batch by batch."""
        batches = images.batches(device, mean, std, images.scored_at_once(device))
        return torch.cat([self(batch) for batch in batches])

    def shards(self) -> Iterator[dict[str, Tensor]]:
        """The tensors to save, a file at a time."""
        raise NotImplementedError


class Single(Inference):
    """One network, and facts about how its rule made it, for the log."""

    def __init__(self, net: PrototypeNet, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.net = net
        self.facts = dict(facts or {})

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.net(images)
        return scores

    def shards(self) -> Iterator[dict[str, Tensor]]:
        yield self.net.weights()


Moments = tuple[Tensor, Tensor]
"""Mean and standard deviation of features, each (features,)."""


def moments_of(features: Tensor) -> Moments:
    """The moments of features (n, features)."""
    return features.mean(0), features.std(0, correction=0)


class Expert(nn.Module):
    """One client's network with its sample and class counts and the statistics that rules need."""

    samples: Tensor
    class_counts: Tensor
    noise_feature: Tensor

    def __init__(self, net: PrototypeNet, samples: Tensor, class_counts: Tensor, statistics: dict[str, Tensor]) -> None:
        super().__init__()
        self.net = net
        self.set_moments: Moments | None = None
        """Of its features of all images that are scored together, while a transductive rule scores a set batch by batch."""
        self.register_buffer("samples", samples.float())
        self.register_buffer("class_counts", class_counts.float())
        self.register_buffer("noise_feature", torch.zeros(net.encoder.features))
        for name, value in statistics.items():
            self.register_buffer(f"statistic_{name}", value)

    def statistic(self, name: str) -> Tensor:
        value: Tensor = getattr(self, f"statistic_{name}")
        return value

    def output(self, images: Tensor) -> ExpertOutput:
        """Features and logits of normalised images."""
        features: Tensor = self.net.encoder(images)
        if hasattr(self, "statistic_turn"):  # into another client's feature space
            features = features @ self.statistic("turn")
        return ExpertOutput(features, self)


class ExpertOutput:
    """One client's features and logits of a batch of images."""

    def __init__(self, features: Tensor, expert: Expert) -> None:
        self.features = features
        """(n, features) of the encoder"""
        self.expert = expert
        self.unit = F.normalize(features, dim=1)
        """(n, features) of length 1"""
        self.logits = expert.net.classify(features)
        """(n, classes) of the client's own prototypes or head"""


class Combine(Protocol):
    """How an ensemble rule folds outputs into totals and totals into scores."""

    @property
    def transductive(self) -> bool:
        """Whether scores of an image depend on the images scored with it."""
        ...

    def begin(self, images: Tensor) -> Totals | None:
        """Initial totals of a batch, before any expert; None for most rules."""
        ...

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals: ...

    def scores(self, totals: Totals) -> Tensor: ...


class Combiner(nn.Module):
    """A `Combine` that has tensors: they are the first shard of its saved ensemble."""

    transductive = False

    def begin(self, images: Tensor) -> Totals | None:
        return None

    def begin_all(self, images: Images, device: torch.device, mean: float, std: float) -> Totals | None:
        """`begin` for a whole set, if that is cheaper than batch by batch."""
        return None

    def shard(self) -> dict[str, Tensor]:
        """Its tensors, to save."""
        raise NotImplementedError


Experts = Iterable[Expert]
"""The experts of an ensemble, in memory or built one at a time; iterated as often as necessary."""


class Ensemble(Inference):
    """Clients' networks side by side, combined by a rule."""

    def __init__(self, rule: Combine, experts: Experts) -> None:
        super().__init__()
        self.rule = rule
        self.experts: Experts = cast(Experts, nn.ModuleList(experts)) if isinstance(experts, list) else experts

    def load_experts(self) -> Ensemble:
        """Load all experts into memory, to use or export the whole model."""
        if not isinstance(self.experts, nn.ModuleList):
            self.experts = cast(Experts, nn.ModuleList(self.experts))
        return self

    def forward(self, images: Tensor) -> Tensor:
        totals = self.rule.begin(images)
        for expert in self.experts:
            totals = self.rule.add(totals, expert.output(images))
        assert totals is not None
        return self.rule.scores(totals)

    def shards(self) -> Iterator[dict[str, Tensor]]:
        if isinstance(self.rule, Combiner):
            yield self.rule.shard()
        for expert in self.experts:
            yield {name: value.detach().cpu().contiguous() for name, value in expert.state_dict().items()}


def plus(totals: Totals | None, **terms: Tensor) -> Totals:
    """Add terms to running totals."""
    return {name: value if totals is None else totals[name] + value for name, value in terms.items()}


def check_transductive(recipe: Federated, channels: int, classes: int, images: int) -> None:
    """Refuse transductive scores of a network without batch norm, or on too few test images (0: none are scored)."""
    if not recipe.trains:
        raise RecipeError(
            "evaluation.batch_norm = batch: no network is trained, so there is no batch norm; set running"
        )
    if not has_batch_norm(meta_network(recipe.encoder, channels, classes, recipe.model.head)):
        raise RecipeError(
            f"evaluation.batch_norm = batch: {recipe.encoder.label} has no batch norm; set running, or take another encoder"
        )
    if 0 < images < SMALLEST_BATCH:
        raise DataError(
            f"evaluation.batch_norm = batch: {images} test images; statistics of a test batch need at least {SMALLEST_BATCH}, "
            "set running"
        )
