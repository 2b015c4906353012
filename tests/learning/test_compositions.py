"""Parts compose: whatever the recipe accepts trains, and what it does not accept is refused with a reason."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from oneround import acts
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.fusion import rules
from oneround.reading import load
from oneround.recipe import Recipe
from oneround.site import Site

TERMS = (
    "cross-entropy",
    "supervised-contrastive",
    "bank-contrastive",
    "prototype-feature",
    "prototype-separation",
    "reference",
    "distillation",
)
NUMBERS = st.sampled_from([0.0, 0.5, 2.0])


def options(**choices: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=choices)


CONTRAST = options(beta=NUMBERS, synthetic=st.sampled_from([0, 3]), per_class=st.booleans(), weight=NUMBERS)
BY_TERM = {
    "cross-entropy": options(adjust=NUMBERS, weight=NUMBERS),
    "supervised-contrastive": CONTRAST,
    "bank-contrastive": CONTRAST,
    "prototype-feature": options(temperature=st.sampled_from([0.5, 1.0])),
    "prototype-separation": options(weight=NUMBERS),
    "distillation": options(temperature=st.sampled_from([0.5, 2.0])),
    "reference": options(match=st.sampled_from(["moments", "coral", "mmd"]), weight=NUMBERS),
}
ALIGNMENT = options(
    anchors=st.sampled_from(["etf", "random"]), target=st.sampled_from(["prototypes", "features"]), classes=st.sampled_from(["all", "present"]),
    distance=st.sampled_from(["squared", "cosine"]), path=st.sampled_from(["direct", "progressive"]),
    weight=st.sampled_from(["fixed", "entropy", "uncertainty", {"kind": "uncertainty", "coupled": True, "rescale": True}, "equilibrium"]),
    schedule=st.sampled_from(["constant", "linear", "cosine"]), guard=st.sampled_from(["none", "hinge", "inverse-variance", "clamp"]),
)  # fmt: skip
STAGES = st.sampled_from(
    [[], [{"share": 0.5}, {}], [{"epochs": 1, "terms": {"cross-entropy": 1.0}, "align": False}, {}]]
)
FUSION = st.lists(st.sampled_from(sorted(rules.kinds)), min_size=1, max_size=3, unique=True)


@st.composite
def compositions(draw: st.DrawFn) -> dict[str, Any]:
    """Slots filled at random, whether they fit or not."""
    names = draw(st.lists(st.sampled_from(TERMS), min_size=1, max_size=4, unique=True))
    maybe = lambda strategy: draw(st.none() | strategy)  # noqa: E731
    choice = {
        "objective": {"terms": {name: draw(BY_TERM[name]) for name in names}, "stages": draw(STAGES)},
        "alignment": maybe(ALIGNMENT),
        "bank": maybe(options(size=st.sampled_from([5, 4096]), teacher_epochs=st.just(1))),
        "queue": maybe(options(size=st.sampled_from([7, 64]), warm_up=st.sampled_from([0, 1]))),
        "reference": maybe(
            options(
                source=st.sampled_from(["public", "sphere", "simplex"]), size=st.just(12), teacher_epochs=st.just(1)
            )
        ),
        "public": draw(st.sampled_from([0.0, 0.1])),
        "training": {"sampling": draw(st.sampled_from(["shuffle", "balanced"]))},
        "fusion": draw(FUSION),
    }
    return _fitted(choice) if draw(st.integers(0, 3)) else choice


def _fitted(choice: dict[str, Any]) -> dict[str, Any]:
    """What its parts need is there; most draws, so that most are trained."""
    terms = choice["objective"]["terms"]
    terms.pop("distillation", None)
    terms["cross-entropy"] = {**terms.get("cross-entropy", {}), "weight": 1.0}
    more: dict[str, Any] = {"public": 0.1}
    if "bank-contrastive" in terms:
        more["bank"] = {"teacher_epochs": 1, **(choice["bank"] or {})}
    if "reference" in terms:
        more["reference"] = {"teacher_epochs": 1, **(choice["reference"] or {})}
    if {"ridge", "routed"} & set(choice["fusion"]):
        more["sums"] = {"features": {"kind": "patches", "size": 96, "patch": 4}}
    if not {"supervised-contrastive", "bank-contrastive"} & terms.keys():
        more["queue"] = None
    if choice["alignment"] and "uncertainty" not in str(choice["alignment"].get("weight")):
        more["alignment"] = {**choice["alignment"], "guard": "none"}
    return choice | more


def composed(choice: dict[str, Any]) -> Recipe:
    """From scratch: nothing of a preset is left in it."""
    training = {"epochs": 2, "batch_size": 8, **choice["training"]}
    model = {"encoder": {"kind": "cnn", "width": 4}}
    return load("fafi", [*{**choice, "training": training, "model": model}.items()])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(choice=compositions())
def test_what_the_recipe_accepts_trains_and_the_rest_is_refused_with_a_reason(
    choice: dict[str, Any], digits: Dataset
) -> None:
    try:
        recipe = composed(choice)
    except RecipeError as error:
        event("refused")
        for told in str(error).splitlines():  # one for each fault
            assert len(told) > 20 and any(section in told for section in (*choice, *TERMS, "guard", "terms")), told
        return
    event("trained")
    settled = acts.settle(recipe, digits)
    server = Site("server", digits.train.take(torch.arange(100, 130)))
    broadcast = acts.prepare(settled, digits.class_names, digits.shape, server if recipe.public else None)
    mine = digits.train.take(torch.arange(8))  # one step an epoch: two steps
    upload = acts.train(broadcast, Site("site", mine))
    assert upload.epoch == 2
    assert all(torch.isfinite(value).all() for value in upload.weights.values() if value.is_floating_point())
    assert upload.statistics.keys() == acts.statistics_of(broadcast).keys()
