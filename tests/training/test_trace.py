"""What the trace says of gradients is what autograd says, and tracing changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from clients import broadcast_of, few, series, trained
from oneround import acts
from oneround.config.load import load
from oneround.data import Dataset
from oneround.site import Site
from oneround.training.objective import active
from oneround.training.trace import gradients, spread
from random_batches import random_batch


def test_gradients_of_terms_at_features_and_prototypes() -> None:
    batch, chosen = random_batch(24, 4, 1, features=8), active(load("fafi").objective)
    anchors = torch.zeros(4, 8)
    traced = gradients(chosen, batch, lambda seen: (seen.prototypes - anchors).square().mean())
    z, y, p = batch.unit.double().numpy(), batch.labels.numpy(), batch.prototypes.double().numpy()
    softmax = np.exp(z @ p.T) / np.exp(z @ p.T).sum(1, keepdims=True)
    error = (softmax - np.eye(4)[y]) / 24
    at_z, at_p, align = error @ p, error.T @ z, 2 * p / 32
    assert traced["features"]["norm"]["cross-entropy"] == pytest.approx(np.linalg.norm(at_z), rel=1e-5)
    assert traced["prototypes"]["norm"]["cross-entropy"] == pytest.approx(np.linalg.norm(at_p), rel=1e-5)
    assert traced["prototypes"]["norm"]["alignment"] == pytest.approx(np.linalg.norm(align), rel=1e-5)
    assert traced["features"]["cosine"]["cross-entropy · prototype-feature"] == pytest.approx(1, abs=1e-5)
    similarity = z @ z.T / 0.07
    np.fill_diagonal(similarity, -np.inf)
    share = np.exp(similarity) / np.exp(similarity).sum(1, keepdims=True)
    same = (y[:, None] == y) & ~np.eye(24, dtype=bool)
    pull = (share - same / same.sum(1, keepdims=True)) / 24 / 0.07
    contrast = (pull + pull.T) @ z
    expected = (at_z * contrast).sum() / np.linalg.norm(at_z) / np.linalg.norm(contrast)
    assert traced["features"]["cosine"]["cross-entropy · supervised-contrastive"] == pytest.approx(expected, abs=1e-4)
    separation = torch.from_numpy(p).requires_grad_()
    F.cross_entropy(separation @ separation.T, torch.arange(4)).backward()
    base = 2 * at_p + separation.grad.numpy()  # type: ignore[union-attr]
    expected = (base * align).sum() / np.linalg.norm(base) / np.linalg.norm(align)
    assert traced["prototypes"]["cosine"]["base · alignment"] == pytest.approx(expected, abs=1e-4)
    # a gradient that vanishes has no direction
    assert traced["prototypes"]["cosine"]["cross-entropy · supervised-contrastive"] is None
    assert traced["features"]["cosine"]["base · alignment"] is None


def test_every_term_is_in_the_trace_and_tracing_changes_nothing(digits: Dataset) -> None:
    upload = trained(digits, "v12", samples=96, training__epochs=3, trace__every=1)
    terms = {"cross-entropy", "supervised-contrastive", "prototype-feature", "prototype-separation"}
    weight = {"lambda_raw", "s", "lambda_effective", "lambda_applied", "sigma_base", "sigma_align", "entropy"}
    expected = terms | weight | {"loss", "base", "align", "gradient_norm", "gradients", "spread"}
    assert all(expected <= entry.keys() for entry in upload.history)
    untraced = trained(digits, "v12", samples=96, training__epochs=3, trace__every=0)
    assert all("gradients" not in entry for entry in untraced.history)
    assert all(torch.equal(value, untraced.weights[name]) for name, value in upload.weights.items())


def test_gradients_are_looked_at_once_in_so_many_steps(digits: Dataset) -> None:
    upload = trained(digits, "fafi", samples=96, training__epochs=10, trace__every=12)  # 3 steps an epoch
    epochs = [entry["epoch"] for entry in upload.history if "gradients" in entry]
    assert epochs == [1, 4, 8, 10]


def test_conflict_with_a_bank_is_visible(digits: Dataset) -> None:
    upload = trained(digits, "v5", samples=96, training__epochs=2, trace__every=1)
    assert "bank-contrastive · cross-entropy" in upload.history[0]["gradients"]["features"]["cosine"]


def test_spread_is_zero_when_features_are_one_point() -> None:
    assert abs(float(spread(F.normalize(torch.ones(5, 3), dim=1)))) < 1e-6
    assert float(spread(torch.eye(4))) == 0.75


def test_where_the_prototypes_are_is_traced_every_epoch(digits: Dataset) -> None:
    broadcast = broadcast_of(digits, "etf", epochs=3)
    upload = acts.train(broadcast, Site("site", few(digits)))
    p, a = upload.weights["prototypes"].numpy(), broadcast.extras["anchors"].numpy()
    lengths = np.linalg.norm(p, axis=1)
    cosines = (p * a).sum(1) / lengths / np.linalg.norm(a, axis=1)
    assert np.isclose(series(upload, "anchor_cosine")[-1], cosines.mean(), atol=1e-6)
    assert np.isclose(series(upload, "prototype_norm")[-1], lengths.mean(), rtol=1e-5)
    turned = trained(
        digits, "etf", epochs=3, alignment__distance="cosine", alignment__weight__value=50.0, training__clip_norm=0.0
    )
    assert series(turned, "anchor_cosine")[-1] > series(upload, "anchor_cosine")[-1] + 0.1
    assert "anchor_cosine" not in trained(digits, "fafi", epochs=1).history[0]
