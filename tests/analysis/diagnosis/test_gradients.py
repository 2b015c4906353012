"""Rules about gradients that oppose each other and features that collapse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diagnosis.doctored import ALIGNED, PLAIN, Ran, history, seen


def test_interference_names_the_pair_and_the_place(steady: Ran, healthy: Ran) -> None:
    gradients: Any = steady.series("gradients")
    wanted = {}
    for client, traced in gradients.items():
        cosines = [traced[epoch]["prototypes"]["cosine"]["base · alignment"] for epoch in range(1, 7)]
        ends = [epoch for epoch in range(3, 7) if max(cosines[epoch - 3 : epoch]) < -0.1]
        wanted |= {client: (ends[0], cosines[ends[0] - 1])} if ends else {}
    found = [each for each in steady.of("gradient-interference") if each.about == "base · alignment at the prototypes"]
    assert wanted and {each.client: (each.epoch, each.value) for each in found} == wanted
    assert all("base · alignment at the prototypes" in each.evidence for each in found)
    assert "gradient-interference" in healthy.diagnosis.applied


def test_collapsed_features_are_reported(collapsed: Ran) -> None:
    spread = collapsed.series("spread")
    wanted = {}
    for client, values in spread.items():
        ends = [epoch for epoch in (3, 4) if all(values[epoch - back] < 0.01 for back in range(3))]
        wanted |= {client: ends[0]} if ends else {}
    assert wanted and {each.client: each.epoch for each in collapsed.of("feature-collapse")} == wanted


def test_interference_needs_a_gradient_that_can_undo_the_other() -> None:
    """Doctored: cosines and norms."""

    def at(cosines: list[float | None], shorter: float = 1.0, weight: float = 1.0) -> list[int | None]:
        norm = {"base": 1.0, "alignment": shorter}
        traces = [{"prototypes": {"norm": norm, "cosine": {"base · alignment": cosine}}} for cosine in cosines]
        run = history(ALIGNED, len(cosines), gradients=traces, lambda_effective=weight)
        return [epoch for epoch, _ in seen(run, "gradient-interference")]

    assert at([-0.2, -0.2, -0.2]) == [3] and at([-0.2, -0.2, -0.1, -0.2, None, -0.2, -0.2]) == []
    assert at([-0.2] * 3, 0.04) == [] and at([-0.2] * 3, 0.04, 2.0) == [3], "λ makes it as strong as it acts"


def test_one_class_has_one_point_and_a_moment_is_no_collapse() -> None:
    """Doctored: spread."""
    assert seen(history(PLAIN, spread=0.009, classes_seen=2), "feature-collapse") == [(3, 0.009)]
    assert seen(history(PLAIN, spread=0.011, classes_seen=2), "feature-collapse") == []
    assert seen(history(PLAIN, spread=[0.001, 0.001, 0.5] * 7, classes_seen=2), "feature-collapse") == []
    alone = history(PLAIN, spread=0.001, classes_seen=2)
    assert seen(replace(alone, disclosed={"a": [99, 1]}), "feature-collapse") == []
    assert seen(history(PLAIN, spread=0.001, classes_seen=1), "feature-collapse") == []
