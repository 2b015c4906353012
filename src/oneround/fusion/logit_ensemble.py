"""Logit ensemble: the clients' own logits, averaged by sample count."""

from __future__ import annotations

from torch import Tensor

from oneround.config.parts import Needs
from oneround.fusion.base import EnsembleRule, rules
from oneround.models.inference import ExpertOutput, Totals, plus


@rules.register("logit-ensemble")
class LogitEnsemble(EnsembleRule):
    """Σ_k n_k z_k·P_kᵀ / Σ_k n_k"""

    @property
    def needs(self) -> Needs:
        return Needs(network=True)

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals:
        samples = output.expert.samples
        return plus(totals, logits=samples * output.logits, samples=samples)

    def scores(self, totals: Totals) -> Tensor:
        return totals["logits"] / totals["samples"]
