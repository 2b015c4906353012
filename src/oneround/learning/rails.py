"""When training goes off the rails: what happened, at which client and epoch, and the likely cause."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from oneround.recipe import Federated

COLLAPSED = 1e-4  # spread of unit features below which they are one point


class Trouble(NamedTuple):
    """One thing that went wrong."""

    kind: str
    text: str


def look(recipe: Federated, measured: dict[str, Any], threshold: float) -> Trouble | None:
    """The worst that an epoch's figures show, in words; `threshold`: λ above which SGD on the prototypes is unstable."""
    epoch, weight = measured["epoch"], measured.get("lambda_applied")
    raw = measured.get("lambda_raw", 0.0)
    shown = "" if weight is None else f", λ = {weight:.4g}"
    if not (math.isfinite(measured["loss"]) and math.isfinite(measured["gradient_norm"])):
        cause = _why_not_finite(recipe, measured, threshold)
        return Trouble(
            "not-finite", f"epoch {epoch}{shown}: the loss or its gradient is not finite; likely cause: {cause}"
        )
    if weight is not None and raw > recipe.rails.largest_weight and weight >= recipe.rails.largest_weight:
        return Trouble("weight", f"epoch {epoch}{shown}: λ is out of range (rails.largest_weight = {recipe.rails.largest_weight:g}); "
                       f"likely cause: {_why_it_grew(measured)}; SGD on the prototypes is unstable above {threshold:.4g}")  # fmt: skip
    if measured.get("spread", 1.0) < COLLAPSED and measured.get("classes_seen", 1) > 1:
        return Trouble("collapse", f"epoch {epoch}{shown}: features of different classes are one point (spread {measured['spread']:.1g}); "
                       "likely cause: a term that only attracts, or a learning rate that is too large")  # fmt: skip
    return None


def _why_not_finite(recipe: Federated, measured: dict[str, Any], threshold: float) -> str:
    raw, pull = measured.get("lambda_raw"), recipe.alignment
    if raw is not None and pull is not None:
        ran_away = not (math.isfinite(raw) and raw > 0) or raw > 1e30
        if ran_away and hasattr(pull.weight, "rate"):
            return f"σ ran away, its steps are too large (alignment.weight.rate = {pull.weight.rate:g})"
        if not raw < threshold:
            return f"λ is past {threshold:.4g}, where SGD on the prototypes is unstable"
    training = recipe.training
    return (
        f"the steps are too large (training.learning_rate = {training.learning_rate:g}, "
        f"training.clip_norm = {training.clip_norm:g}, 0 being no clipping)"
    )


def _why_it_grew(measured: dict[str, Any]) -> str:
    if "sigma_align" not in measured:
        return "the weight policy's own options"
    return (
        f"a learned λ tends to L_base/(s·L_align) = {measured['base']:.3g}/({measured['s']:.2g}·{measured['align']:.2g}), "
        "which grows as alignment succeeds and as s falls; a guard bounds it (etf-guarded, etf-hinge), decaying λ relaxes it"
    )
