"""Logit ensemble: every client answers for itself, the answers are averaged by sample count."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from oneround.fusion.rule import EnsembleRule, rules
from oneround.models.inference import Seen, Totals, plus


@rules.register("logit-ensemble")
class LogitEnsemble(EnsembleRule):
    """Σ_k n_k z_k·P_kᵀ / Σ_k n_k"""

    needs_prototypes: ClassVar[bool] = False

    def add(self, totals: Totals | None, seen: Seen) -> Totals:
        samples = seen.expert.samples
        return plus(totals, logits=samples * seen.logits, samples=samples)

    def scores(self, totals: Totals) -> Tensor:
        return totals["logits"] / totals["samples"]
