"""The fusion of FedSRA (2026): the clients' features, each client's standardised, add up and are compared with common anchors.

    s_k(x) = (f_k(x) − μ_k)/(σ_k + ε),  F(x) = Σ_k √n_k·s_k(x),  class = argmax_c cos(F(x), A_c),  ε = 1e-8

μ_k and σ_k are moments of client k's raw features: of its own images (`own`), or of the images that are scored together (`test`), which
is transductive. A_c are the mean prototypes, centred over the classes; those that are fixed on a simplex ETF (preset `fedsra`) are the
anchors themselves. A feature that does not vary has no scale and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.config.sections import SMALLEST_BATCH
from oneround.errors import DataError
from oneround.fusion.base import EnsembleRule, rules
from oneround.models.inference import ExpertOutput, Moments, Totals, moments_of, plus
from oneround.protocol.messages import Shapes

EPSILON = 1e-8
TEMPERATURE = 0.1  # of the cosines, as in training


@rules.register("fedsra")
class FedSRA(EnsembleRule):
    """Standardised features summed by the root of the sample counts, against the centred mean of the prototypes."""

    moments: Literal["own", "test"] = "own"
    """Of whose images: the client's, or those that are scored (transductive)."""

    @property
    def transductive(self) -> bool:
        return self.moments == "test"

    @property
    def discloses(self) -> str:
        return "" if self.transductive else "mean and spread of every feature of its images"

    def statistics(self, classes: int, features: int) -> Shapes:
        return {} if self.transductive else {"feature_mean": (features,), "feature_deviation": (features,)}

    def measure_raw(self, features: Tensor) -> dict[str, Tensor]:
        if self.transductive:
            return {}
        mean, deviation = moments_of(features)
        return {"feature_mean": mean, "feature_deviation": deviation}

    def check_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        if self.transductive:
            return
        lowest = float(statistics["feature_deviation"].min())
        if lowest < 0:
            raise ValueError(f"feature_deviation holds {lowest:.3g}, and it cannot be below 0")

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals:
        expert = output.expert
        moments = _of_scored(output) if self.transductive else own_moments(output)
        return plus(
            totals,
            features=expert.samples.sqrt() * standardised(output.features, moments),
            prototypes=expert.net.prototypes,
        )

    def scores(self, totals: Totals) -> Tensor:
        return cosines(totals["features"], totals["prototypes"]) / TEMPERATURE


def own_moments(output: ExpertOutput) -> Moments:
    """The moments that the client has uploaded."""
    return output.expert.statistic("feature_mean"), output.expert.statistic("feature_deviation")


def _of_scored(output: ExpertOutput) -> Moments:
    """The moments over the whole set that is being scored; outside of scoring, over this batch."""
    if output.expert.set_moments is not None:
        return output.expert.set_moments
    images = len(output.features)
    if images < SMALLEST_BATCH:
        raise DataError(
            f"fedsra moments=test: moments of {images} images; take at least {SMALLEST_BATCH} at once, or moments: own"
        )
    return moments_of(output.features)


def standardised(features: Tensor, moments: Moments) -> Tensor:
    """(n, features): z-scores; 0 where a feature does not vary."""
    mean, deviation = moments
    scale = torch.where(deviation > EPSILON, 1 / (deviation + EPSILON), torch.zeros_like(deviation))
    return (features - mean) * scale


def cosines(features: Tensor, prototypes: Tensor) -> Tensor:
    """(n, classes): between features and prototypes that are centred over the classes."""
    return F.normalize(features, dim=1) @ F.normalize(prototypes - prototypes.mean(0), dim=1).T
