"""Entropy gate: listen to clients that are sure.

Client k answers p_k = softmax(z_k·P_kᵀ); its weight is n_k·exp(−sharpness·H(p_k)), H in nats; the answers are averaged.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from oneround.fusion.rule import EnsembleRule, rules
from oneround.models.inference import Seen, Totals, plus
from oneround.sections import NotNegative

TINY = 1e-30


@rules.register("entropy-gated")
class EntropyGated(EnsembleRule):
    """Clients' probabilities, weighted by sample count and certainty."""

    needs_prototypes: ClassVar[bool] = False

    sharpness: NotNegative = 3.0

    def add(self, totals: Totals | None, seen: Seen) -> Totals:
        log_p = seen.logits.log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum(1, keepdim=True)
        gate = seen.expert.samples * (-self.sharpness * entropy).exp()
        return plus(totals, votes=gate * log_p.exp(), gate=gate)

    def scores(self, totals: Totals) -> Tensor:
        return (totals["votes"] / totals["gate"].clamp(min=TINY)).clamp(min=TINY).log()
