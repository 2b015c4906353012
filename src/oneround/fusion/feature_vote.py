"""Feature vote: after training, clients upload some features of their own images, which vote for their class by similarity.

    score_c(x) = log Σ_k Σ_{u of class c at k} (n_kc/m_kc)·e^{z_k(x)·u/τ}

Each client k uploads up to m unit features u of every class it holds. They are compared with x in the client's own feature
space. A vote counts for all n_kc images of the class, where only m_kc of them are uploaded. It discloses features of single images, from which similar images can be reconstructed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from oneround.config.sections import Positive
from oneround.fusion.base import EnsembleRule, rules
from oneround.fusion.typicality_gated import MAX_NORM
from oneround.models.inference import ExpertOutput, Totals
from oneround.protocol.messages import Shapes, Upload

NO_VOTE = -1e30  # the log of no vote


@rules.register("feature-vote")
class FeatureVote(EnsembleRule):
    """Uploaded features of every client vote for their class, the nearer the stronger."""

    per_class: Annotated[int, Field(ge=1, le=1000)] = 20
    """Maximum number of features of each class that a client uploads."""
    temperature: Positive = 0.07

    @property
    def discloses(self) -> str:
        return f"features of up to {self.per_class} single images of every class, from which similar images can be reconstructed"

    def statistics(self, classes: int, features: int) -> Shapes:
        return {"features": (classes, self.per_class, features), "features_weight": (classes,)}

    def measure(self, unit: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        """The first of each class: the order of a client's samples carries no information."""
        uploaded = unit.new_zeros(classes, self.per_class, unit.shape[1])
        weight = unit.new_zeros(classes)
        for label in range(classes):
            members = unit[labels == label]
            chosen = members[: self.per_class]
            uploaded[label, : len(chosen)] = chosen
            weight[label] = len(members) / max(1, len(chosen))
        return {"features": uploaded, "features_weight": weight}

    def check_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        if float(statistics["features"].norm(dim=2).max()) > MAX_NORM:
            raise ValueError("features are of length 1 and cannot be longer")
        if float(statistics["features_weight"].min()) < 0:
            raise ValueError("features_weight counts images and cannot be below 0")

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals:
        uploaded, weight = output.expert.statistic("features"), output.expert.statistic("features_weight")
        present = uploaded.square().sum(2) > 0
        votes = torch.einsum("nd,cmd->ncm", output.unit, uploaded) / self.temperature
        scores = votes.masked_fill(~present, NO_VOTE).logsumexp(2) + weight.clamp(min=1e-30).log()
        scores = torch.where(weight > 0, scores, NO_VOTE)
        return {"votes": scores if totals is None else torch.logaddexp(totals["votes"], scores)}

    def scores(self, totals: Totals) -> Tensor:
        return totals["votes"]


def class_sums(uploads: Iterable[Upload]) -> Tensor:
    """Sum over all uploaded features of a class, each for as many images as it stands for (classes, features); 0 without any."""
    statistics = (upload.statistics for upload in uploads)
    return torch.stack([each["features"].sum(1) * each["features_weight"][:, None] for each in statistics]).sum(0)
