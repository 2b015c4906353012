"""What a global model can be made of: one network, or an ensemble of clients' networks combined by a rule.

An ensemble goes through its experts one after another and folds what each sees into running totals, so it works the same
with all experts in memory (a saved model in use) or with one at a time read from disk (scoring two hundred uploads).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneround.data import Images
from oneround.models.prototype import PrototypeNet

Totals = dict[str, Tensor]
M = TypeVar("M", bound=nn.Module)


def placed(module: M, device: torch.device) -> M:
    """On the device and ready to answer: nothing is trained, and on a GPU in the layout its convolutions like."""
    layout = torch.channels_last if device.type == "cuda" else torch.preserve_format
    return module.to(device, memory_format=layout).eval().requires_grad_(False)  # type: ignore[call-overload,no-any-return]


class Inference(nn.Module):
    """Normalised images → scores (n, classes); larger is likelier."""

    def answers(self, images: Images, device: torch.device, mean: float, std: float) -> Tensor:
        """Its scores on a whole set, a few images at a time."""
        return torch.cat([self(batch) for batch in images.batches(device, mean, std)])

    def shards(self) -> Iterator[dict[str, Tensor]]:
        """The tensors to save, a file at a time."""
        raise NotImplementedError


class Single(Inference):
    """One network, and what the rule that made it has to tell of how it did."""

    def __init__(self, net: PrototypeNet, told: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.net = net
        self.told = dict(told or {})

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.net(images)
        return scores

    def shards(self) -> Iterator[dict[str, Tensor]]:
        yield self.net.weights()


class Expert(nn.Module):
    """One client's network and what else its upload says: sample and class counts, statistics a rule asked for."""

    samples: Tensor
    class_counts: Tensor
    noise_feature: Tensor

    def __init__(self, net: PrototypeNet, samples: Tensor, class_counts: Tensor, statistics: dict[str, Tensor]) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("samples", samples.float())
        self.register_buffer("class_counts", class_counts.float())
        self.register_buffer("noise_feature", torch.zeros(net.encoder.features))
        for name, value in statistics.items():
            self.register_buffer(f"statistic_{name}", value)

    def statistic(self, name: str) -> Tensor:
        value: Tensor = getattr(self, f"statistic_{name}")
        return value

    def see(self, images: Tensor) -> Seen:
        """What this client's network makes of normalised images."""
        features: Tensor = self.net.encoder(images)
        if hasattr(self, "statistic_turn"):  # into the space another client's features are in
            features = features @ self.statistic("turn")
        return Seen(features, self)


class Seen:
    """One client's view of a batch of images."""

    def __init__(self, features: Tensor, expert: Expert) -> None:
        self.features = features
        """(n, features) as they leave the encoder"""
        self.expert = expert
        self.unit = F.normalize(features, dim=1)
        """(n, features) of length 1"""
        self.logits = expert.net.answer(features)
        """(n, classes) the client's own answer"""


class Combine(Protocol):
    """How an ensemble rule folds views into totals and totals into scores."""

    def begin(self, images: Tensor) -> Totals | None:
        """What it makes of the images itself, before any expert sees them; most make nothing."""
        ...

    def add(self, totals: Totals | None, seen: Seen) -> Totals: ...

    def scores(self, totals: Totals) -> Tensor: ...


class Experts(Protocol):
    """The experts of an ensemble, in memory or read one at a time."""

    def __iter__(self) -> Iterator[Expert]: ...

    def __len__(self) -> int: ...


class Ensemble(Inference):
    """Clients' networks side by side, combined by a rule."""

    def __init__(self, rule: Combine, experts: Experts | Sequence[Expert]) -> None:
        super().__init__()
        self.rule = rule
        self.experts: Experts = cast(Experts, nn.ModuleList(experts)) if isinstance(experts, list) else experts

    def settle(self) -> Ensemble:
        """Take all experts into memory, to use or export the model as a whole."""
        if not isinstance(self.experts, nn.ModuleList):
            self.experts = cast(Experts, nn.ModuleList(self.experts))
        return self

    def forward(self, images: Tensor) -> Tensor:
        totals = self.rule.begin(images)
        for expert in self.experts:
            totals = self.rule.add(totals, expert.see(images))
        assert totals is not None
        return self.rule.scores(totals)

    def shards(self) -> Iterator[dict[str, Tensor]]:
        for expert in self.experts:
            yield {name: value.detach().cpu().contiguous() for name, value in expert.state_dict().items()}


def plus(totals: Totals | None, **terms: Tensor) -> Totals:
    """Add terms to running totals."""
    return {name: value if totals is None else totals[name] + value for name, value in terms.items()}
