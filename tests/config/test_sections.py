"""Each section of a recipe refuses values that contradict each other, in one line that says what to set."""

from __future__ import annotations

from typing import Any

import pytest

from oneround.config.load import checked, load
from oneround.config.sections import Companion, Objective, Sums
from oneround.errors import RecipeError

STEPS = {"training.schedule": "steps"}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fafi", {"training.augment.crop_scale": [0.9, 0.2]}, r"crop_scale must rise from above 0"),
    ("fafi", {"training.augment.crop_ratio": [2.0, 1.0]}, r"crop_ratio must rise from above 0"),
    ("fafi", {"training.augment.crop_scale": [0.0, 0.2]}, r"crop_scale must rise from above 0"),
    ("fafi", {"training.augment.hue": 0.7}, r"training\.augment\.hue = 0\.7: must be ≤ 0\.5"),
    ("fafi", STEPS, r"schedule = steps with milestones = \[\]: name milestones"),
    ("fafi", {"training.milestones": [2]}, r"milestones = \[2\]: set schedule: steps"),
    ("fafi", {**STEPS, "training.milestones": [8, 3]}, r"milestones = \[8, 3\]: must rise"),
    ("fafi", {**STEPS, "training.milestones": [3, 3]}, r"must rise, each once"),
    (
        "fafi",
        {"training.nesterov": True, "training.momentum": 0.0},
        r"nesterov: needs optimizer: sgd and a momentum above 0",
    ),
    ("v6", {"objective.stages.0.terms": {"cros-entropy": 1.0}}, r"no such term; did you mean 'cross-entropy'"),
    ("v6", {"objective.stages.0.share": None}, r"stages\.0: give share or epochs, one of both"),
    ("v6", {"objective.stages.0.epochs": 3}, r"stages\.0: give share or epochs, one of both"),
    ("v6", {"objective.stages.1.share": 0.5}, r"stages\.1: the last stage takes the rest"),
    ("v6", {"objective.stages.0.terms": {"bank-contrastive": 0.0}}, r"stages\.0\.terms: no term counts"),
    (
        "v10",
        {"alignment.guard": "hinge", "alignment.weight": "fixed"},
        r"hinge acts on σ, which weight: fixed does not have",
    ),
    ("bank", {"bank.teacher.terms": {"cross-entropy": {"weight": 0}}}, r"teacher\.terms is empty"),
    (
        "bank",
        {"bank.teacher.terms": {"bank-contrastive": {}}},
        r"bank-contrastive: needs a bank, which a teacher does not",
    ),
    ("ridge", {"sums.secure": True, "sums.precision": "fp16"}, r"precision = fp16: sums under masks are whole numbers"),
    ("ridge", {"sums.secure": True, "sums.rank": 9}, r"rank = 9: sums under masks are whole numbers"),
    (
        "ridge",
        {"sums.precision": "int16", "sums.rank": 9},
        r"precision = int16: directions \(rank\) have no common scale",
    ),
]


@pytest.mark.parametrize(("method", "changes", "message"), REFUSED)
def test_values_that_contradict_each_other_are_refused(method: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load(method, changes)
    assert "\n" not in str(caught.value)


def test_a_term_s_name_is_its_kind() -> None:
    named = checked(Objective, {"terms": {"supervised-contrastive": {"temperature": 0.5}, "cross-entropy": None}})
    assert [term.kind for term in named.terms.values()] == ["supervised-contrastive", "cross-entropy"]
    assert named.terms["supervised-contrastive"].dump()["temperature"] == 0.5
    assert checked(Companion, "mergenet") == Companion()


@pytest.mark.parametrize(("weight", "empty"), [(0.0, True), (0.1, False)])
def test_an_objective_without_weights_is_empty(weight: float, empty: bool) -> None:
    assert checked(Objective, {"terms": {"cross-entropy": {"weight": weight}}}).empty is empty


@pytest.mark.parametrize(("mirror", "copies"), [("copies", 2), ("features", 1), ("none", 1), (None, 1)])
def test_only_mirror_images_counted_as_copies_double_the_count(mirror: str | None, copies: int) -> None:
    assert Sums(mirror=mirror).copies == copies
