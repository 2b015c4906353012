"""The ridge solution from sums alone, and its penalty."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge as SklearnRidge

from oneround import acts, sums
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.protocol import Broadcast
from oneround.site import Site
from oneround.sums import Moments, solve, unpacked
from small_sums import broadcast_of, upload_of


@pytest.fixture(scope="module")
def broadcast(digits: Dataset) -> Broadcast:
    return broadcast_of(digits)


def test_sums_and_solution_are_their_formulas(broadcast: Broadcast, digits: Dataset) -> None:
    mine = digits.train.take(np.arange(300))
    constants = sums.constants_of(broadcast.recipe, broadcast.shape, broadcast.extras)
    features = sums.features_of(broadcast.recipe, broadcast.shape, constants)
    outputs = features((mine.pixels.float() / 255 - 0.5) / 0.5).double().numpy()
    targets = np.eye(10)[mine.labels.numpy()]
    moments = unpacked(acts.train(broadcast, Site("site", mine)).sums)
    for found, expected in (
        (moments.gram, outputs.T @ outputs),
        (moments.cross, outputs.T @ targets),
        (moments.total, outputs.sum(0)),
        (moments.counts, targets.sum(0)),
    ):
        assert np.abs(found.numpy() - expected).max() <= 1e-5 * np.abs(expected).max()
    solution = solve(moments, penalty=0.03)
    ridge = 0.03 * np.var(outputs, 0).mean() * len(outputs)
    oracle = SklearnRidge(alpha=ridge).fit(outputs, targets)
    assert np.abs(solution.weights.numpy().T - oracle.coef_).max() < 1e-4
    assert np.abs((solution.bias - solution.centre @ solution.weights).numpy() - oracle.intercept_).max() < 1e-4
    centred = outputs - outputs.mean(0)
    hat = centred @ np.linalg.solve(centred.T @ centred + ridge * np.eye(96), centred.T)
    assert abs(solution.freedom - 1 - np.trace(hat)) < 0.1 * np.trace(hat)


def test_the_penalty_is_the_one_cross_validation_would_choose(broadcast: Broadcast, digits: Dataset) -> None:
    """Against leave-one-out, computed directly for every λ: the sums alone find one that is as good."""
    mine = digits.train.take(np.arange(120))
    constants = sums.constants_of(broadcast.recipe, broadcast.shape, broadcast.extras)
    outputs = sums.features_of(broadcast.recipe, broadcast.shape, constants)((mine.pixels.float() / 255 - 0.5) / 0.5)
    centred = (outputs - outputs.mean(0)).double().numpy()
    targets = np.eye(10)[mine.labels.numpy()]
    targets = targets - targets.mean(0)
    level = (centred**2).sum(0).mean()

    def left_out(penalty: float) -> float:
        hat = centred @ np.linalg.solve(centred.T @ centred + penalty * level * np.eye(96), centred.T) + 1 / 120
        return float((((targets - hat @ targets) / (1 - np.diag(hat))[:, None]) ** 2).mean())

    chosen = solve(unpacked(acts.train(broadcast, Site("site", mine)).sums)).penalty
    grid = [10**power for power in np.arange(-5, 2, 0.25)]
    best = min(grid, key=left_out)
    assert left_out(chosen) < 1.03 * left_out(best)
    assert left_out(chosen) < 0.8 * max(left_out(chosen / 100), left_out(chosen * 100))


def test_sums_of_no_features_end_the_search(broadcast: Broadcast) -> None:
    wrong = Moments(torch.eye(4).double(), torch.zeros(4, 2).double(), torch.zeros(4).double(), torch.ones(2).double())
    wrong.gram[0, 1] = wrong.gram[1, 0] = 1e12
    with pytest.raises(RunError, match="are not a valid second-moment matrix"):
        solve(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("images", [20, 60, 120, 250])
def test_few_images_are_no_reason_to_be_sure(broadcast: Broadcast, digits: Dataset, images: int) -> None:
    """Fewer than features, or hardly more: λ is not at the end of the search, and wrong answers are not given for certain."""
    other = broadcast_of(digits, sums__features={"kind": "patches", "size": 160, "patch": 3})
    upload = upload_of(other, digits, "site", np.arange(images))
    found = solve(unpacked(upload.sums))
    assert images - found.freedom >= 1 and 1e-6 < found.penalty < 1e3
    probabilities = acts.fuse([upload], other).predict(digits.test.pixels)
    right = probabilities.gather(1, digits.test.labels[:, None])
    assert float(-right.clamp(min=1e-30).log().mean()) < 4


def test_copies_are_no_images_of_their_own_when_errors_are_counted(broadcast: Broadcast, digits: Dataset) -> None:
    once = unpacked(upload_of(broadcast, digits, "site", np.arange(200)).sums)
    one, two = solve(once, 0.1), solve(once + once, 0.1, copies=2)
    assert two.noise == pytest.approx(one.noise, rel=1e-6) and two.freedom == pytest.approx(one.freedom, rel=1e-6)
    assert solve(once + once, 0.1).noise < 0.9 * one.noise
    assert solve(once + once, copies=2).penalty == pytest.approx(solve(once).penalty)


def test_nobody_left_is_one_line() -> None:
    with pytest.raises(RunError, match="the sums contain no images"):
        solve(Moments.zero(4, 2))
