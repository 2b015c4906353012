"""FedSRA's fusion against its formula, with the clients' moments and with the test set's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from oneround import acts
from oneround.data import Dataset, Images
from oneround.errors import DataError, ProtocolError
from oneround.evaluate import is_transductive, score_uploads, transductive_name
from oneround.fusion import rules
from oneround.fusion.fedsra import FedSRA
from oneround.models.prototype import network_from
from oneround.site import Site
from oracle import Federation, Oracle


def fedsra(features: list[np.ndarray], moments: list[tuple[np.ndarray, np.ndarray]], n: list[int], p: list[np.ndarray]):  # type: ignore[no-untyped-def]
    """The published sum: z-scores of every client's raw features, √n, the nearest of the centred mean prototypes."""
    total = np.zeros_like(features[0])
    for f, (mean, deviation), samples in zip(features, moments, n, strict=True):
        alive = deviation > 1e-8
        total += np.sqrt(samples) * np.where(alive, (f - mean) / np.where(alive, deviation + 1e-8, 1), 0)
    anchors = np.mean(p, 0)
    anchors = anchors - anchors.mean(0)
    anchors /= np.linalg.norm(anchors, axis=1, keepdims=True)
    return total / np.linalg.norm(total, axis=1, keepdims=True) @ anchors.T / 0.1


def test_the_sum_is_the_published_one(oracle: Oracle) -> None:
    named = [
        tuple(upload.statistics[f"feature_{name}"].double().numpy() for name in ("mean", "deviation"))
        for upload in oracle.uploads
    ]
    assert np.abs(oracle.scores("fedsra") - fedsra(oracle.f, named, oracle.n, oracle.p)).max() < 1e-3  # type: ignore[arg-type]
    of_set = [(f.mean(0), f.std(0)) for f in oracle.f]
    ours = oracle.scores({"kind": "fedsra", "moments": "test"})
    assert np.abs(ours - fedsra(oracle.f, of_set, oracle.n, oracle.p)).max() < 1e-3
    assert np.abs(ours - oracle.scores("fedsra")).max() > 0.1


def test_a_client_uploads_the_moments_of_its_raw_features(federation: Federation, digits: Dataset) -> None:
    _, broadcast, _ = federation
    data = digits.train.take(torch.arange(50))
    upload = acts.train(broadcast, Site("client_0", data))
    net = network_from(broadcast.recipe.encoder, 1, 10, upload.weights).eval()
    with torch.no_grad():
        features = net.encoder((data.pixels.float() / 255 - 0.5) / 0.5)
    assert torch.allclose(upload.statistics["feature_mean"], features.mean(0), atol=1e-5)
    assert torch.allclose(upload.statistics["feature_deviation"], features.std(0, correction=0), atol=1e-5)
    below = {**upload.statistics, "feature_deviation": -upload.statistics["feature_deviation"]}
    with pytest.raises(ProtocolError, match=r"feature_deviation holds -.*cannot be below 0"):
        acts.check_usable(replace(upload, statistics=below), broadcast, "upload")


def test_a_feature_that_does_not_vary_is_left_out(federation: Federation, digits: Dataset) -> None:
    _, broadcast, uploads = federation
    changed = [
        replace(
            each,
            statistics={
                **each.statistics,
                "feature_deviation": each.statistics["feature_deviation"].index_fill(0, torch.tensor([0]), 0.0),
            },
        )
        for each in uploads
    ]
    images = digits.test.pixels[:20].float() / 255
    scores = acts.fuse(changed, broadcast, rule=rules.parse("fedsra"))(images)
    assert bool(torch.isfinite(scores).all()) and float(scores.abs().max()) <= 10.001


def test_moments_of_the_test_set_are_of_all_of_it_and_are_called_transductive(
    federation: Federation, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, broadcast, uploads = federation
    monkeypatch.setattr(Images, "scored_at_once", lambda *_: 50)
    rule = FedSRA(moments="test")
    assert rule.label == "fedsra moments=test, transductive" and is_transductive(rule.label)
    assert not is_transductive(FedSRA().label) and transductive_name(rule.label, 256) == rule.label
    assert not rule.statistics(10, 16) and not rule.discloses
    server = Site("server", None)
    by_label = digits.test.take(digits.test.labels.argsort())  # batches of one or two classes would have other moments
    scores = score_uploads({"it": rule}, uploads, broadcast, by_label, server)
    model = acts.fuse(uploads, broadcast, rule=rule)
    at_once = model(by_label.pixels.float() / 255).argmax(1)
    assert sum(scores.rules["it"].confusion[label][label] for label in range(10)) == int(
        (at_once == by_label.labels).sum()
    )
    with pytest.raises(DataError, match="moments of 3 images; take at least 32 at once, or moments: own"):
        model(by_label.pixels[:3].float() / 255)
