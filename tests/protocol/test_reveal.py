"""What a site tells of itself can be reduced, and then nothing else tells it."""

from __future__ import annotations

import json

import pytest
import torch

from conftest import small_recipe
from oneround import acts
from oneround.data import Dataset
from oneround.describe import describe
from oneround.errors import RecipeError
from oneround.protocol.reveal import told_counts
from oneround.sections import Noise, Reveal
from oneround.site import Site

COUNTS = torch.tensor([40, 0, 3, 0, 8])


def test_hidden_counts_tell_only_their_sum() -> None:
    told = told_counts(COUNTS, Reveal(class_counts=False))
    assert told.tolist() == [11, 10, 10, 10, 10]
    assert torch.equal(told_counts(COUNTS, Reveal()), COUNTS)


def test_noise_has_the_scale_its_epsilon_says() -> None:
    """A discrete Laplace variable has E|k| = 2q/(1−q²) with q = e^{−ε}; drawn from the system, never twice the same."""
    for epsilon in (0.5, 2.0):
        large = torch.full((20_000,), 10**6)
        off = told_counts(large, Reveal(class_counts=Noise(epsilon=epsilon))) - large
        q = float(torch.tensor(-epsilon).exp())
        assert abs(float(off.abs().double().mean()) / (2 * q / (1 - q * q)) - 1) < 0.1
        assert abs(float(off.double().mean())) < 0.1 / epsilon
    noisy = Reveal(class_counts=Noise(epsilon=0.1))
    assert len({tuple(told_counts(COUNTS, noisy).tolist()) for _ in range(20)}) > 10
    for _ in range(50):
        told = told_counts(torch.tensor([1, 0]), noisy)
        assert (told >= 0).all() and told.sum() > 0 and told.dtype == torch.int64


def test_nothing_in_an_upload_tells_what_is_hidden(digits: Dataset) -> None:
    """Two sites with as many samples but other classes say the same, apart from what they learned."""
    told = []
    alignment = {"weight": "entropy"}
    for classes in ([0, 1], [2, 3, 4, 5, 6]):
        recipe = acts.settle(small_recipe(reveal__class_counts=False, fusion=["iffi"], alignment=alignment), digits)
        broadcast = acts.prepare(recipe, digits.class_names, digits.shape)
        mine = torch.nonzero(torch.isin(digits.train.labels, torch.tensor(classes)))[:200, 0]
        raw = acts.train(broadcast, Site("a", digits.train.take(mine))).pack()
        manifest = json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["oneround"])
        assert set(manifest["history"][0]) == {"epoch", "learning_rate", "loss"}
        manifest["history"][0].pop("loss"), manifest.pop("sha256")
        told.append(manifest)
    assert told[0] == told[1]


def test_a_rule_that_tells_classes_cannot_be_hidden() -> None:
    with pytest.raises(
        RecipeError, match=r"hides nothing while fusion has typicality-gated.*leave out typicality-gated"
    ):
        small_recipe(reveal__class_counts=False)
    with pytest.raises(RecipeError, match="hides nothing"):
        small_recipe(reveal__class_counts={"epsilon": 1.0})
    assert small_recipe(reveal__class_counts={"epsilon": 1.0}, fusion=["iffi"]).reveal.class_counts == Noise(
        epsilon=1.0
    )
    for telling in ("feature-vote", "dynamic-prototypes", {"kind": "distilled", "images": "noise"}):
        for told in (False, {"epsilon": 1.0}):
            with pytest.raises(RecipeError, match="hides nothing"):
                small_recipe(reveal__class_counts=told, fusion=["iffi", telling])
    with pytest.raises(RecipeError, match=r"epsilon = 0.*must be > 0"):
        small_recipe(reveal__class_counts={"epsilon": 0.0}, fusion=["iffi"])


@pytest.mark.parametrize(
    "rule",
    [
        "split",
        {"kind": "split", "chosen": "client"},
        {"kind": "dynamic-prototypes", "by": "size"},
        "aligned-iffi",
        {"kind": "distilled", "teacher": "split", "images": "noise"},
    ],
)
def test_a_rule_that_goes_by_counts_is_refused_where_they_are_hidden(rule: object) -> None:
    with pytest.raises(RecipeError, match=r"goes by class counts, and they are hidden; tell them with noise"):
        small_recipe(reveal__class_counts=False, fusion=["iffi", rule])
    assert small_recipe(reveal__class_counts={"epsilon": 1.0}, fusion=["iffi", rule])


def test_a_method_says_what_its_rules_reveal() -> None:
    assert "features of up to 20 single images of every class" in " ".join(
        describe("fafi+features", "cnn", 10, 0).reveals
    )
    assert "how well it answers, for every class" in describe("fafi+dynamic-prototypes", "cnn", 10, 0).reveals
    alone = describe("fafi+distilled", "cnn", 10, 100, [("fusion", ["distilled"])]).reveals
    assert "mean features of every class and their common spread" in alone, "what its teacher asks for"
