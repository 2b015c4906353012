"""Rules about λ: they find what they are for, and nothing on the other side of their limits."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from diagnosis.doctored import ALIGNED, OVER_LAMBDA, PLAIN, Ran, history, recipe_of, seen
from oneround.training.alignment.aligner import instability_threshold

pytestmark = pytest.mark.slow


def test_an_exploding_weight_is_reported_with_client_epoch_and_threshold(exploded: Ran) -> None:
    raw, effective = exploded.series("lambda_raw"), exploded.series("lambda_applied")
    wanted = {}
    for client, values in raw.items():
        limit = min(1000.0, max(50.0, 100 * min(values[epoch] for epoch in (1, 2, 3))))
        epochs = [epoch for epoch in sorted(values) if values[epoch] >= limit or effective[client][epoch] >= limit]
        if epochs:
            severity = "problem" if max(effective[client].values()) >= limit else "warning"
            wanted[client] = (epochs[0], raw[client][epochs[0]], limit, severity)
    found = exploded.of("exploding-lambda")
    assert wanted and len(wanted) == len(found)
    for each in found:
        assert each.client is not None
        assert (each.epoch, each.value, each.threshold, each.severity) == wanted[each.client]
    recipe, features = exploded.diagnosis.run.recipe, exploded.diagnosis.run.feature_size
    assert features == 16
    threshold = instability_threshold(recipe, 10, 16)
    assert threshold == pytest.approx(1.9 * 10 * 16 / 0.05)
    for each in found:
        assert each.client is not None and f"= {threshold:.4g}" in each.evidence and "guard" in each.advice
        past = [epoch for epoch, value in sorted(effective[each.client].items()) if value > threshold]
        assert each.evidence.endswith(f"passed in epoch {past[0]}" if past else f"{threshold:.4g}")


def test_alignment_that_outweighs_the_base_loss_is_reported(exploded: Ran) -> None:
    base, align, weight = (exploded.series(key) for key in ("base", "align", "lambda_applied"))
    wanted = {}
    for client in base:
        over = [weight[client][epoch] * align[client][epoch] > base[client][epoch] for epoch in range(1, 11)]
        ends = [epoch for epoch in range(3, 11) if all(over[epoch - 3 : epoch])]
        wanted |= {client: ends[0]} if ends else {}
    assert wanted and {each.client: each.epoch for each in exploded.of("over-alignment")} == wanted
    assert all(each.value > each.threshold == 1 for each in exploded.of("over-alignment"))


def test_sigma_that_swings_is_reported(exploded: Ran) -> None:
    found = exploded.of("unstable-sigma")
    assert found and all(each.client in exploded.series("lambda_raw") for each in found)
    for each in found:
        assert each.client is not None
        raw = [value for epoch, value in sorted(exploded.series("lambda_raw")[each.client].items()) if epoch > 2]
        assert max(max(a / b, b / a) for a, b in pairwise(raw)) > 100


def test_a_learned_weight_that_stays_in_range_is_no_finding(steady: Ran) -> None:
    assert not OVER_LAMBDA & steady.rules and set(steady.diagnosis.applied) >= OVER_LAMBDA


def test_explosion_is_growth_or_the_rails_and_not_a_small_weight() -> None:
    """Doctored: the limit itself, either side of it."""

    def at(values: list[float], effective: list[float] | float = 0.0) -> list[tuple[int | None, float]]:
        return seen(history(ALIGNED, len(values), lambda_raw=values, lambda_effective=effective), "exploding-lambda")

    assert at([2.0] * 5 + [199.0]) == [] and at([2.0] * 5 + [200.0]) == [(6, 200.0)]
    assert at([0.1] * 5 + [49.0]) == [] and at([0.1] * 5 + [50.0]) == [(6, 50.0)]
    assert at([20.0] * 5 + [999.0]) == [] and at([20.0] * 5 + [1000.0, 5.0]) == [(6, 1000.0)]
    assert at([20.0, 30.0], [20.0, 1001.0]) == [(2, 1001.0)]
    assert at([2.0] * 3 + [200.0] * 3, [2.0] * 5 + [201.0]) == [(4, 200.0)], "whichever passes first"
    assert at([5.0, 5.0, math.inf]) == [(3, math.inf)] and at([0.0] * 5) == []
    assert at([1.0, 50.0, 100.0]) == [(3, 100.0)], "the start is the smallest of the first epochs"


def test_over_alignment_must_last() -> None:
    """Doctored: three epochs in a row, or a tenth of a long training."""

    def at(over: list[bool], recipe: Any = PLAIN) -> list[int | None]:
        run = history(recipe, len(over), lambda_effective=[2.0 if each else 1.0 for each in over], align=1.0, base=1.5)
        return [epoch for epoch, _ in seen(run, "over-alignment")]

    assert at([True, True, False] * 5) == [] and at([False, True, True, True, False]) == [4]
    assert at([False] + [True] * 3, ALIGNED) == [] and at([False] + [True] * 4, ALIGNED) == [5]
    assert at([True] * 3, recipe_of("fafi", 2)) == [2]


def test_swings_of_sigma_must_be_large_repeated_and_after_the_warm_up() -> None:
    """Doctored: σ² that goes up and down."""

    def at(values: list[float]) -> list[int | None]:
        run = history(ALIGNED, len(values), sigma_align=values, sigma_base=1.0, lambda_raw=1.0, lambda_effective=1.0)
        return [epoch for epoch, _ in seen(run, "unstable-sigma")]

    assert at([1.0, 1.0, *[1.0, 2.0] * 3]) == [7]
    assert at([1.0, 1.0, *[1.0, 1.4] * 6]) == [], "batch noise"
    assert at([1.0, 1.0, 1.0, 2.0, 1.0, 2.0]) == [], "twice is settling"
    assert at([9.0, 1.0, 9.0, 1.0, 9.0, 9.0, 9.0]) == [], "the warm-up"
    assert at([1.0, 1.0, *[1.0, 2.0, 1.0, *[1.0] * 8] * 3]) == [], "far apart"
    assert at([1.0, 1.0, 1.0, 9e3]) == [] and at([1.0, 1.0, 1.0, 1.1e4]) == [4], "a leap"
    assert at([2.0**n for n in range(20)]) == [], "growth is no swing"
