"""The bank is what a teacher sees in public images, which no client holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clients import broadcast_of, trained
from oneround import acts
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.server.plan import DealtPlan
from oneround.training import Batch


def test_no_client_holds_a_public_image_and_all_methods_see_the_same_partition(digits: Dataset) -> None:
    plans = [
        DealtPlan.of(load(name, [("public", 0.1), ("partition.alpha", 0.3)]), digits) for name in ("v4", "v5", "v6")
    ]
    assert len({plan.split.digest for plan in plans}) == 1
    split = plans[0].split
    clients = np.concatenate(split.clients)
    assert not set(clients) & set(split.public.tolist())
    assert len(clients) + len(split.public) == len(digits.train)
    shares = np.bincount(digits.train.labels[split.public].numpy()) / np.bincount(digits.train.labels.numpy())
    assert np.allclose(shares, 0.1, atol=0.005)
    assert DealtPlan.of(load("v4", [("partition.alpha", 0.3)]), digits).split.digest != split.digest


def test_the_bank_is_what_a_teacher_sees_in_the_public_images(digits: Dataset) -> None:
    broadcast = broadcast_of(digits, "v5", 2, bank__size=100, bank__teacher_epochs=15)
    unit, labels = broadcast.extras["bank.features"], broadcast.extras["bank.labels"]
    assert unit.shape[0] == 100 and torch.allclose(unit.norm(dim=1), torch.ones(100), atol=1e-5)
    own = unit @ unit.T
    same = (labels[:, None] == labels) & ~torch.eye(100, dtype=torch.bool)
    other = labels[:, None] != labels
    assert own[same].mean() > own[other].mean() + 0.1  # it learned the classes
    again = broadcast_of(digits, "v5", 2, bank__size=100, bank__teacher_epochs=15)
    assert torch.equal(again.extras["bank.features"], unit)
    assert (
        broadcast_of(digits, "v5", 2, bank__teacher_epochs=1).extras["bank.labels"].shape[0] == 143
    )  # the whole public set


def test_a_bank_pushes_and_a_plain_contrast_does_not(digits: Dataset) -> None:
    upload = trained(digits, "v5", 2)
    assert "supervised-contrastive" not in upload.history[0]
    assert upload.history[0]["bank-contrastive"] > trained(digits, "v4", 2).history[0]["supervised-contrastive"]
    assert Batch(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 2)).bank is None


@pytest.mark.parametrize(
    ("preset", "changes", "fault"),
    [
        ("v6", {"bank": None}, "needs bank"),
        ("v6", {"public": 0.0}, "its features come from public images"),
        (
            "fafi",
            {"public": 0.1, "bank": {"teacher": {"terms": {"distillation": {}}}}},
            r"bank.*needs a teacher, which a teacher",
        ),
    ],
)
def test_a_bank_that_means_nothing_is_refused(preset: str, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        load(preset, changes.items())


def test_a_bank_without_public_images_says_what_to_set(digits: Dataset) -> None:
    recipe = acts.resolve(load("v5", [("model.encoder", {"kind": "cnn", "width": 4})]), digits)
    with pytest.raises(RecipeError, match="a bank: the server has no public images; set public"):
        acts.prepare(recipe, digits.class_names, digits.shape)
