"""A plan says before the run what it will do, and refuses what cannot be done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import small_recipe
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.server.plan import DealtPlan
from ridge_runs import SMALL


def test_wrong_labels_are_at_the_clients_asked_for(digits: Dataset) -> None:
    recipe = small_recipe(label_noise={"clients": 2, "share": 0.5}, partition__kind="iid", validation=0.1)
    plan = DealtPlan.of(recipe, digits)
    wrong = (plan.data.train.labels != digits.train.labels).numpy()
    shares = [
        wrong[np.concatenate([own, validation])].mean()
        for own, validation in zip(plan.split.clients, plan.split.client_validation, strict=True)
    ]
    assert sorted(round(share, 2) for share in shares) == [0, 0, 0, 0.5, 0.5]
    assert plan.split.digest == DealtPlan.of(small_recipe(partition__kind="iid", validation=0.1), digits).split.digest
    assert any("wrong on purpose" in remark for remark in plan.remarks())
    with pytest.raises(RecipeError, match=r"label_noise.clients = 9: must be ≤ 5"):
        DealtPlan.of(small_recipe(label_noise={"clients": 9}, partition__kind="iid"), digits)


@pytest.mark.parametrize(
    ("snapshots", "epochs"), [(0, [7]), (3, [3, 6, 7]), (10, [7]), ([1, 4], [1, 4, 7]), ([7], [7])]
)
def test_snapshots_are_every_so_many_epochs_or_after_those_named(
    snapshots: int | list[int], epochs: list[int], digits: Dataset
) -> None:
    recipe = small_recipe(training__epochs=7, snapshots=snapshots)
    assert DealtPlan.of(recipe, digits).snapshot_epochs == epochs


def test_a_rank_that_saves_nothing_is_remarked(digits: Dataset) -> None:
    def remarks(rank: int) -> str:
        return " ".join(DealtPlan.of(load("ridge", [*SMALL, ("sums.rank", rank)]), digits).remarks())

    assert "rank" not in remarks(20)
    assert "sums.rank = 100000 makes uploads no smaller: 42 kB, where all second moments are 23 kB" in remarks(100000)
    assert "rank = 60 makes" in remarks(60)


def test_masks_on_a_natural_partition_wait_for_the_data(digits: Dataset) -> None:
    masked = [*SMALL[:2], ("sums.secure", True), ("reveal.class_counts", False), ("partition", {"kind": "natural"})]
    with pytest.raises(RecipeError, match=r"quorum = 2: with sums\.secure masks cancel only in the sum of all clients"):
        load("ridge", [*masked, ("quorum", 2)])
    groups = torch.arange(len(digits.train)) % 3
    assert len(DealtPlan.of(load("ridge", masked), replace(digits, groups=groups)).clients) == 3
    with pytest.raises(RecipeError, match="only one client"):
        DealtPlan.of(load("ridge", masked), replace(digits, groups=0 * groups))
