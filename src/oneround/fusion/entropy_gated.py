"""Entropy gate: confident clients count more.

Client k predicts p_k = softmax(z_k·P_kᵀ) with the weight n_k·exp(−sharpness·H(p_k)), H in nats; predictions are averaged.
"""

from __future__ import annotations

from torch import Tensor

from oneround.config.parts import Needs
from oneround.config.sections import NotNegative
from oneround.fusion.base import EnsembleRule, rules
from oneround.models.inference import ExpertOutput, Totals, plus

TINY = 1e-30


@rules.register("entropy-gated")
class EntropyGated(EnsembleRule):
    """Clients' probabilities, weighted by sample count and certainty."""

    sharpness: NotNegative = 3.0

    @property
    def needs(self) -> Needs:
        return Needs(network=True)

    def add(self, totals: Totals | None, output: ExpertOutput) -> Totals:
        log_p = output.logits.log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum(1, keepdim=True)
        gate = output.expert.samples * (-self.sharpness * entropy).exp()
        return plus(totals, votes=gate * log_p.exp(), gate=gate)

    def scores(self, totals: Totals) -> Tensor:
        return (totals["votes"] / totals["gate"].clamp(min=TINY)).clamp(min=TINY).log()
