"""Post-hoc features: after training, clients upload some features of their own images, and the server asks the nearest.

Each client k sends up to m unit features of every class it holds. The server lets all of them vote on x, each in its own
client's space: score_c = log Σ_k Σ_{u of class c at k} e^{z_k(x)·u/τ}, where a client sent fewer of a class than it holds its
votes weigh more. Reveals features of single images, from which something like those images can be made.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from oneround.fusion.rule import EnsembleRule, rules
from oneround.models.inference import Seen, Totals
from oneround.protocol.messages import Shapes
from oneround.sections import Positive

NOTHING = -1e30  # the log of no vote


@rules.register("feature-vote")
class FeatureVote(EnsembleRule):
    """Uploaded features of every client vote for their class, the nearer the stronger."""

    per_class: Annotated[int, Field(ge=1, le=1000)] = 20
    """How many features of each class a client uploads, at most."""
    temperature: Positive = 0.07

    @property
    def reveals(self) -> str:
        return f"features of up to {self.per_class} single images of every class, from which something like them can be made"

    def statistics(self, classes: int, features: int) -> Shapes:
        return {"features": (classes, self.per_class, features), "features_weight": (classes,)}

    def measure(self, unit: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        """The first of each class: a client's samples are in no order that says anything."""
        kept = unit.new_zeros(classes, self.per_class, unit.shape[1])
        weight = unit.new_zeros(classes)
        for label in range(classes):
            mine = unit[labels == label]
            chosen = mine[: self.per_class]
            kept[label, : len(chosen)] = chosen
            weight[label] = len(mine) / max(1, len(chosen))
        return {"features": kept, "features_weight": weight}

    def add(self, totals: Totals | None, seen: Seen) -> Totals:
        sent, weight = seen.expert.statistic("features"), seen.expert.statistic("features_weight")
        there = sent.square().sum(2) > 0
        votes = torch.einsum("nd,cmd->ncm", F.normalize(seen.features, dim=1), sent) / self.temperature
        mine = votes.masked_fill(~there, NOTHING).logsumexp(2) + weight.clamp(min=1e-30).log()
        mine = torch.where(weight > 0, mine, NOTHING)
        return {"votes": mine if totals is None else torch.logaddexp(totals["votes"], mine)}

    def scores(self, totals: Totals) -> Tensor:
        return totals["votes"]
