"""Safeguards of training: detect a failed epoch and report the symptom and the likely cause."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from oneround.config.recipe import Federated
from oneround.config.sections import Generator
from oneround.training.alignment.weights import Uncertainty

COLLAPSED = 1e-4  # spread of unit features below which they are one point


class Trouble(NamedTuple):
    """One problem in an epoch."""

    kind: str
    text: str
    """With λ, the losses and the likely cause; for the site's own log."""
    summary: str
    """Epoch and symptom only, without figures measured at the site."""


def check_epoch(recipe: Federated, metrics: dict[str, Any], threshold: float) -> Trouble | None:
    """The most severe problem in an epoch's metrics, or None; `threshold`: λ above which SGD on the prototypes is unstable."""
    limit = recipe.safeguards.largest_weight
    if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"])):
        symptom, cause = "the loss or its gradient is not finite", _why_not_finite(recipe, metrics, threshold)
        return _trouble(metrics, "not-finite", symptom, cause)
    aligns = "align" in metrics  # a stage may not
    if aligns and metrics["lambda_raw"] > limit and metrics["lambda_applied"] >= limit:
        symptom = f"is out of range (safeguards.largest_weight = {limit:g})"
        cause = f"{_why_it_grew(metrics)}; SGD on the prototypes is unstable above {threshold:.4g}"
        return _trouble(metrics, "weight", f"λ {symptom}", cause, f"the alignment's weight {symptom}")
    if metrics["spread"] < COLLAPSED and metrics["classes_seen"] > 1:
        symptom = "features of all classes have collapsed to one point"
        cause = "a term that only attracts, or a learning rate that is too large"
        return _trouble(metrics, "collapse", f"{symptom} (spread {metrics['spread']:.1g})", cause, symptom)
    return None


def check_generator(generator: Generator, metrics: dict[str, Any]) -> Trouble | None:
    """A generator's loss that is not finite, or None."""
    if math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"]):
        return None
    cause = (
        f"the steps are too large (generator.learning_rate = {generator.learning_rate:g}, "
        f"generator.clip_norm = {generator.clip_norm:g}, 0 being no clipping)"
    )
    return _trouble(metrics, "not-finite", "the generator's loss or its gradient is not finite", cause)


def _trouble(metrics: dict[str, Any], kind: str, symptom: str, cause: str, summary: str = "") -> Trouble:
    """`summary`: the symptom without figures measured at the site, where it has some."""
    epoch, weight = metrics["epoch"], metrics.get("lambda_applied")
    figure = "" if weight is None else f", λ = {weight:.4g}"
    text = f"epoch {epoch}{figure}: {symptom}; likely cause: {cause}"
    return Trouble(kind, text, f"epoch {epoch}: {summary or symptom}")


def _why_not_finite(recipe: Federated, metrics: dict[str, Any], threshold: float) -> str:
    if recipe.alignment is not None:
        raw, policy = metrics["lambda_raw"], recipe.alignment.weight
        diverged = not 0 < raw <= 1e30  # or not a number
        if diverged and isinstance(policy, Uncertainty):
            return f"σ diverged, its learning rate is too high (alignment.weight.rate = {policy.rate:g})"
        if not raw < threshold:
            return f"λ exceeds {threshold:.4g}, above which SGD on the prototypes is unstable"
    training = recipe.training
    return (
        f"the steps are too large (training.learning_rate = {training.learning_rate:g}, "
        f"training.clip_norm = {training.clip_norm:g}, 0 being no clipping)"
    )


def _why_it_grew(metrics: dict[str, Any]) -> str:
    if "sigma_align" not in metrics:
        return "the weight policy's own options"
    return (
        f"a learned λ tends to L_base/(s·L_align) = {metrics['base']:.3g}/({metrics['s']:.2g}·{metrics['align']:.2g}), "
        "which grows as alignment succeeds and as s falls; a guard bounds it (etf-guarded, etf-hinge), decaying λ relaxes it"
    )
