"""Tests, intervals, corrections and power are the textbook's; false alarms stay at the nominal rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from oneround.analysis.statistics import Summary, compare_paired, holm, p_value, paired, pairs_needed, power


def sweep_of(random: np.random.RandomState, partitions: int, gains: list[float], noise: float) -> list[Summary]:
    """Differences to a baseline: the partition moves everybody by ±10 points, each run by its own noise."""
    luck = 60 + 10 * random.randn(partitions)
    base = luck + noise * random.randn(partitions)
    return [paired(luck + gain + noise * random.randn(partitions), base) for gain in gains]


@pytest.mark.slow
def test_false_alarms_stay_at_the_nominal_rate() -> None:
    random = np.random.RandomState(1)
    alone = [compare_paired(sweep_of(random, 5, [0.0], 2.0))[0].significant for _ in range(4000)]
    assert abs(np.mean(alone) - 0.05) < 3 * math.sqrt(0.05 * 0.95 / 4000)
    family = [
        any(each.significant for each in compare_paired(sweep_of(random, 5, [0.0] * 6, 2.0))) for _ in range(4000)
    ]
    assert np.mean(family) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)
    careless = [
        any((each.p or 1) < 0.05 for each in compare_paired(sweep_of(random, 5, [0.0] * 6, 2.0))) for _ in range(1000)
    ]
    assert np.mean(careless) > 0.12, "without a correction there would be many"


@pytest.mark.parametrize(("partitions", "noise"), [(5, 2.0), (10, 2.0), (5, 1.0)])
def test_power_is_the_predicted_one(partitions: int, noise: float) -> None:
    random = np.random.RandomState(2)
    seen = np.mean([compare_paired(sweep_of(random, partitions, [3.0], noise))[0].significant for _ in range(3000)])
    predicted = power(noise * math.sqrt(2), 3.0, partitions)
    assert abs(seen - predicted) < 3 * math.sqrt(predicted * (1 - predicted) / 3000) + 1e-9


def test_the_number_of_pairs_asked_for_is_the_smallest_that_suffices() -> None:
    for deviation, difference in ((4.0, 1.0), (2.0, 3.0), (7.0, 0.5), (0.1, 5.0)):
        needed = pairs_needed(deviation, difference)
        assert power(deviation, difference, needed) >= 0.8
        assert needed == 2 or power(deviation, difference, needed - 1) < 0.8
    assert pairs_needed(0.0, 1.0) == 2
    assert pairs_needed(100.0, 0.01) == 10_000


def test_tests_and_corrections_are_the_textbooks() -> None:
    random = np.random.RandomState(3)
    for n in (2, 3, 8, 30):
        values = random.randn(n) + 0.4
        assert p_value(Summary(tuple(values))) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert p_value(Summary((1.0,))) is None
    assert p_value(Summary((0.0, 0.0))) == 1.0 and p_value(Summary((2.0, 2.0))) == 0.5
    assert p_value(Summary((2.0,) * 8)) == pytest.approx(stats.binomtest(8, 8).pvalue)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_intervals_are_scipy_s() -> None:
    random = np.random.RandomState(0)
    for n in (2, 3, 10, 40):
        ours, theirs = random.randn(n) * 5 + 70, random.randn(n) * 5 + 60
        found = paired(ours, theirs)
        low, high = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
        assert np.allclose([found.mean - found.margin, found.mean + found.margin], [low, high])
        assert found.distinguishable == (stats.ttest_rel(ours, theirs).pvalue < 0.05)
    assert Summary((3.0,)).margin is None and not Summary((3.0,)).distinguishable
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0], [1.0])


def test_verdicts_in_words() -> None:
    clear, vague, single = compare_paired(
        [Summary((3.0, 3.2, 2.9, 3.1, 3.0)), Summary((2.0, -3.0, 1.5, 4.0, -2.0)), Summary((0.4,))]
    )
    assert clear.verdict().startswith("better by 3.0 points (p = ")
    needed = pairs_needed(float(np.std([2.0, -3.0, 1.5, 4.0, -2.0], ddof=1)), 1.0)
    assert (
        compare_paired([vague.difference])[0].verdict()
        == f"not distinguishable with 5 pairs; about {needed} would be needed to see 1 point"
    )
    assert "says nothing about others" in single.verdict()
    assert clear.effect == pytest.approx(3.04 / np.std([3.0, 3.2, 2.9, 3.1, 3.0], ddof=1))


def test_what_several_comparisons_cost_is_counted_in_pairs() -> None:
    vague = Summary((2.0, -3.0, 1.5, 4.0, -2.0))
    needed = pairs_needed(float(np.std(vague.values, ddof=1)), 1.0, 0.05 / 6)
    assert needed > pairs_needed(float(np.std(vague.values, ddof=1)), 1.0)
    assert f"; about {needed} would be needed" in compare_paired([vague] * 6)[0].verdict()
    assert power(2.0, 3.0, 8, 0.05 / 6) == pytest.approx(
        stats.nct.sf(stats.t.isf(0.05 / 12, 7), 7, 3.0 / 2.0 * math.sqrt(8)), abs=1e-3
    )
    assert all(
        0 <= power(1.0, shift, pairs, level) <= 1
        for shift in (3.0, 20.0, 90.0)
        for pairs in (2, 3, 5)
        for level in (0.05, 0.0025)
    )


def test_verdicts_promise_no_more_than_is_known() -> None:
    (close,) = compare_paired([Summary((0.1, -0.1, 0.05))])
    assert close.verdict() == "not distinguishable with 3 pairs, enough to see 1 point"
    assert (
        close.verdict(0.0001)
        == "not distinguishable with 3 pairs; more than 10,000 would be needed to see 0.0001 points"
    )
    (same,) = compare_paired([Summary((2.0, 2.0 + 1e-13))])
    assert not same.significant and same.effect is None
    assert same.verdict() == "+2.0 on each of 2 partitions: too few to say how much it varies"


def test_a_mean_is_formatted_with_its_margin() -> None:
    assert f"{Summary((3.0,)):.1f}" == "3.0" and f"{Summary((3.0,)):+.1f}" == "+3.0"
    several = Summary((1.0, 2.0, 3.0))
    assert f"{several:.1f}" == f"2.0 ± {several.margin:.1f}" and f"{several:+.2f}" == f"+2.00 ± {several.margin:.2f}"
