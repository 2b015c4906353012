"""The average learns a large network's answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clients import some
from oneround import acts
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.protocol import blob
from oneround.simulate import run
from oneround.site import Site
from teacher_runs import (
    federated,
)


def test_the_average_can_be_taught_by_the_same_teacher(digits: Dataset, tmp_path: Path) -> None:
    result = run(federated("taught", rounds=2), tmp_path / "taught", data=digits)
    run(federated(rounds=2, more={"start_round": 1}), tmp_path / "fused", data=digits)
    taught, fused = (
        blob.read(next((tmp_path / name / "server").rglob("teacher.safetensors")), "teacher")[1]
        for name in ("taught", "fused")
    )
    assert all(torch.equal(fused[name], value) for name, value in taught.items())
    ours = next(curve for name, curve in result.curves.items() if name.startswith("taught"))
    assert ours[1] != result.curves["average"][1]


def test_without_public_images_it_says_what_to_set(digits: Dataset, tmp_path: Path) -> None:
    recipe = acts.resolve(federated("taught", rounds=2), digits)
    broadcast = acts.prepare(recipe, digits.class_names, digits.shape)
    upload = acts.train(broadcast, some(digits, 40))
    with pytest.raises(RecipeError, match=r"fusion.taught: the server has no public images; set public"):
        acts.fuse([upload], broadcast, Site("server", folder=tmp_path))
