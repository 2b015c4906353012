"""The typicality gate against its formula; rare classes, far images and clients without statistics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.covariance import oas as sklearn_oas

from oneround import acts
from oneround.data import Dataset, partitions
from oneround.fusion import rules
from oneround.fusion import typicality_gated as typicality
from oneround.models.prototype import network_from
from oracle import Oracle, softmax


def own_features(oracle: Oracle, digits: Dataset, k: int) -> tuple[np.ndarray, np.ndarray]:
    index = partitions.of(oracle.broadcast.recipe.partition).split(digits, 1).clients[k]
    mine = digits.train.take(index)
    net = network_from(oracle.broadcast.recipe.model.encoder, 1, 10, oracle.uploads[k].weights).double().eval()
    with torch.no_grad():
        f = net.encoder((mine.pixels.double() / 255 - 0.5) / 0.5).numpy()
    return f / np.linalg.norm(f, axis=1, keepdims=True), mine.labels.numpy()


def gaussian(z: np.ndarray, y: np.ndarray) -> tuple[dict[int, np.ndarray], np.ndarray]:
    counts = np.bincount(y, minlength=10)
    means = {c: z[y == c].mean(0) for c in range(10) if counts[c]}
    residuals = np.stack([row - means[c] for row, c in zip(z, y, strict=True)])
    covariance, _ = sklearn_oas(residuals, assume_centered=True)
    enough = min(20, counts.max())
    return {c: m for c, m in means.items() if counts[c] >= enough}, np.linalg.inv(
        covariance + 1e-6 * np.eye(z.shape[1])
    )


def mahalanobis(z: np.ndarray, means: dict[int, np.ndarray], inverse: np.ndarray) -> np.ndarray:
    far = np.full((len(z), 10), np.inf)
    for c, m in means.items():
        far[:, c] = np.einsum("ni,ij,nj->n", z - m, inverse, z - m)
    return far


@pytest.mark.parametrize(("beta", "temperature"), [(1.0, 1.0), (0.3, 5.0)])
def test_typicality_gate(oracle: Oracle, digits: Dataset, beta: float, temperature: float) -> None:
    log_gates, posteriors = [], []
    for k in range(3):
        z, y = own_features(oracle, digits, k)
        left_out = []
        for fold in range(5):
            out = np.arange(len(z)) % 5 == fold
            left_out.append(mahalanobis(z[out], *gaussian(z[~out], y[~out])).min(1))
        scale = np.concatenate(left_out).mean()
        far = mahalanobis(oracle.z[k], *gaussian(z, y))
        log_gates.append(np.log(oracle.n[k]) - beta * far.min(1) / scale)
        with np.errstate(divide="ignore"):
            posteriors.append(softmax((np.log(oracle.counts[k]) - far / 2) / temperature))
    gates = softmax(np.stack(log_gates, 1))
    assert gates.std(0).max() > 0.02
    expected = sum(gates[:, k : k + 1] * posteriors[k] for k in range(3))
    found = np.exp(oracle.scores({"kind": "typicality-gated", "beta": beta, "temperature": temperature}))
    assert np.abs(found - expected).max() < 1e-4


def test_oas_is_scikit_learn_s() -> None:
    for n, d in ((5, 12), (200, 12), (40, 40)):
        rows = np.random.RandomState(n).randn(n, d) @ np.diag(np.linspace(0.1, 3, d))
        expected, _ = sklearn_oas(rows, assume_centered=True)
        assert np.abs(typicality.oas(torch.from_numpy(rows)).numpy() - expected).max() < 1e-10


def test_held_out_distances_are_larger_than_in_sample_ones() -> None:
    spread = torch.linspace(1, 0.01, 64)
    unit = torch.nn.functional.normalize(
        spread * torch.randn(60, 64, generator=torch.Generator().manual_seed(0)), dim=1
    )
    labels = torch.arange(60) % 3
    means, usable, whitening = typicality.gaussian(unit, labels, 3)
    inside = typicality.distances(unit, means, whitening).amin(1).mean()
    assert usable.all() and float(typicality.typical_distance(unit, labels, 3)) > 1.2 * float(inside)


def test_rare_classes_do_not_count_unless_all_are_rare() -> None:
    unit = torch.randn(50, 4)
    _, usable, _ = typicality.gaussian(unit, torch.tensor([0] * 30 + [1] * 20), 3)
    assert usable.tolist() == [True, True, False]
    _, usable, _ = typicality.gaussian(unit, torch.tensor([0] * 31 + [1] * 19), 3)
    assert usable.tolist() == [True, False, False]
    _, usable, _ = typicality.gaussian(unit[:5], torch.tensor([0, 1, 1, 2, 2]), 3)
    assert usable.tolist() == [False, True, True]


def test_no_usable_class_anywhere_falls_back_to_iffi(oracle: Oracle) -> None:
    shut = [replace(u, statistics={**u.statistics, "typicality_usable": torch.zeros(10)}) for u in oracle.uploads]
    images = oracle.pixels.float() / 255
    with torch.no_grad():
        gated = acts.fuse(shut, oracle.broadcast, rule=rules.parse("typicality-gated"))(images)
        plain = acts.fuse(shut, oracle.broadcast, rule=rules.parse("iffi"))(images)
        one = acts.fuse([shut[0], oracle.uploads[1]], oracle.broadcast, rule=rules.parse("typicality-gated"))(images)
        only = acts.fuse([oracle.uploads[1]], oracle.broadcast, rule=rules.parse("typicality-gated"))(images)
    assert torch.equal(gated, plain)
    assert torch.allclose(one, only, atol=1e-5)


def test_an_image_far_from_everybody_still_gets_an_answer(oracle: Oracle) -> None:
    odd = [replace(u, statistics={**u.statistics, "typicality_scale": torch.tensor(1e-6)}) for u in oracle.uploads]
    with torch.no_grad():
        scores = acts.fuse(odd, oracle.broadcast, rule=rules.parse("typicality-gated"))(oracle.pixels.float() / 255)
    assert torch.isfinite(scores).all()
