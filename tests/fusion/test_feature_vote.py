"""Uploaded features vote for their class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from conftest import small_recipe
from oneround import acts
from oneround.config.load import change
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.fusion import rules
from oneround.runs.folder import RunFolder
from oneround.simulate import run
from two_clients import broadcast_of, features_of, scores, uploads_of


def test_features_vote_for_their_class(digits: Dataset) -> None:
    rule = rules.parse({"kind": "feature-vote", "per_class": 3, "temperature": 0.5})
    broadcast = broadcast_of(digits, rule.dump())
    uploads = uploads_of(digits, broadcast)
    assert uploads[0].statistics["features"].shape[:2] == (10, 3)
    assert (uploads[0].statistics["features"][5:] == 0).all() and (
        uploads[0].statistics["features_weight"][5:] == 0
    ).all()
    votes = torch.zeros(40, 10).double()
    for upload in uploads:
        unit = F.normalize(features_of(upload, broadcast, digits), dim=1).double()
        for label in range(10):
            sent = upload.statistics["features"][label].double()
            sent = sent[sent.norm(dim=1) > 0]
            if len(sent):
                share = float(upload.class_counts[label]) / len(sent)
                votes[:, label] += share * (unit @ sent.T / 0.5).exp().sum(1)
    assert torch.allclose(scores(rule, uploads, broadcast, digits).double(), votes.log(), atol=1e-4)


def test_a_later_run_begins_at_the_features_of_an_earlier_one(digits: Dataset, tmp_path: Path) -> None:
    earlier = small_recipe(
        "fafi+features", partition__clients=3, partition__alpha=0.3, training__epochs=2, local__workers=1
    )
    run(earlier, tmp_path / "first", data=digits)
    uploads = RunFolder(tmp_path / "first").uploads()
    later = acts.resolve(small_recipe(local__initial_features=str(tmp_path / "first")), digits)
    begun = acts.prepare(later, digits.class_names, digits.shape).weights
    usual = acts.prepare(change(later, {"local.initial_features": None}), digits.class_names, digits.shape).weights
    assert all(torch.equal(value, usual[name]) for name, value in begun.items() if name != "prototypes")
    for label in range(10):
        total = np.zeros(begun["prototypes"].shape[1])
        for upload in uploads:
            features = upload.statistics["features"][label].double().numpy()
            total += float(upload.class_counts[label]) * features.sum(0) / max(1, (np.abs(features).sum(1) > 0).sum())
        expected = total / np.linalg.norm(total) * float(usual["prototypes"][label].norm())
        assert np.allclose(begun["prototypes"][label].numpy(), expected, atol=1e-4)
    assert later.digest == change(later, {"local.initial_features": None}).digest, "it is the server's own affair"


def test_what_a_later_run_cannot_begin_with_is_refused(digits: Dataset, tmp_path: Path) -> None:
    run(small_recipe(partition__clients=3, training__epochs=1, local__workers=1), tmp_path / "plain", data=digits)
    wide = small_recipe(
        "fafi+features",
        partition__clients=2,
        training__epochs=1,
        model__encoder={"kind": "cnn", "width": 8},
        local__workers=1,
    )
    run(wide, tmp_path / "wide", data=digits)
    for name, text in (
        ("none", "no finished run"),
        ("plain", "its clients uploaded no features; run it with feature-vote"),
        ("wide", "has 10 classes of 32 features, this recipe 10 of 16"),
    ):
        recipe = acts.resolve(small_recipe(local__initial_features=str(tmp_path / name)), digits)
        with pytest.raises(RecipeError, match=text):
            acts.prepare(recipe, digits.class_names, digits.shape)
