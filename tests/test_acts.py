"""The three acts: whatever a recipe accepts trains, and what it does not accept is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from clients import prepared, some
from conftest import small_recipe
from oneround import acts
from oneround.config.load import load
from oneround.config.parts import Needs
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.errors import ProtocolError, RecipeError
from oneround.fusion import EnsembleRule, rules
from oneround.global_model import GlobalModel
from oneround.models.prototype import network_from
from oneround.protocol.encoding import as_received
from oneround.site import Site
from tampering import Federation

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
    """The choice with everything its parts need; most draws, so that most are trained."""
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


@pytest.mark.slow
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
        for line in str(error).splitlines():  # one for each fault
            assert len(line) > 20 and any(section in line for section in (*choice, *TERMS, "guard", "terms")), line
        return
    event("trained")
    settled = acts.resolve(recipe, digits)
    server = Site("server", digits.train.take(torch.arange(100, 130)))
    broadcast = acts.prepare(settled, digits.class_names, digits.shape, server if recipe.public else None)
    mine = digits.train.take(torch.arange(8))  # one step an epoch: two steps
    upload = acts.train(broadcast, Site("site", mine))
    assert upload.epoch == 2
    assert all(torch.isfinite(value).all() for value in upload.weights.values() if value.is_floating_point())
    assert upload.statistics.keys() == acts.statistics_of(broadcast).keys()


def test_nothing_to_fuse_is_refused(federation: Federation) -> None:
    with pytest.raises(ProtocolError, match="no uploads to fuse"):
        acts.fuse([], federation[1])


def test_the_recipe_s_first_rule_makes_the_model(federation: Federation) -> None:
    _, broadcast, uploads = federation
    model: GlobalModel = acts.fuse(uploads, broadcast)
    assert model.rule.kind == "iffi"


@pytest.mark.parametrize(
    ("statistic", "change", "reason"),
    [
        ("typicality_usable", lambda value: value * 0.5, "typicality_usable must be 0 or 1"),
        ("typicality_scale", lambda value: -value, "typicality_scale = -.*: must be above 0"),
        ("typicality_scale", lambda value: value * 0, "typicality_scale = 0: must be above 0"),
        ("typicality_means", lambda value: value * 10, "typicality_means are of unit features"),
        ("typicality_whitening", lambda value: value * 1e6, "typicality_whitening has"),
        ("typicality_whitening", lambda value: value + value.T, "typicality_whitening must be a lower triangle"),
        ("features", lambda value: value * 10, "features are of length 1"),
        ("features_weight", lambda value: value - 1e6, "features_weight counts images"),
        ("reliability", lambda value: value + 1.1, "reliability must be from 0 to 1"),
        ("confidence", lambda value: value - 1.1, "confidence must be from 0 to 1"),
    ],
)
def test_statistics_that_nobody_can_have_measured_are_refused(
    federation: Federation, statistic: str, change: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    """For every rule that asks for statistics; those of honest clients pass, however they travel."""
    _, broadcast, (upload, *_) = federation
    fusion = [*broadcast.recipe.fusion, rules.parse({"kind": "dynamic-prototypes", "by": "reliability"})]
    asking = replace(broadcast, recipe=broadcast.recipe.model_copy(update={"fusion": fusion}))
    judged = {"reliability": torch.tensor(0.5), "confidence": torch.rand(10)}
    statistics = {**judged, **upload.statistics}
    for encoding in ("fp32", "fp16", "int8"):
        acts.check_usable(replace(upload, statistics=as_received(statistics, encoding)), asking, "a")
    changed = {**statistics, statistic: change(statistics[statistic])}
    with pytest.raises(ProtocolError, match=f"a: refused, {reason}"):
        acts.check_usable(replace(upload, statistics=changed), asking, "a")


def test_rules_that_ask_for_one_statistic_in_two_sizes_are_refused(digits: Dataset) -> None:
    """The uploads carry it once, so one of the two rules would be scored with the other's."""
    votes = [{"kind": "feature-vote", "per_class": count} for count in (5, 20)]
    recipe = acts.resolve(small_recipe(fusion=votes), digits)
    with pytest.raises(RecipeError, match=r"fusion: feature-vote and another rule ask for features in different sizes"):
        acts.traffic(recipe, 10, (1, 8, 8), 0)
    broadcast = acts.prepare(acts.resolve(small_recipe(fusion=votes[:1]), digits), digits.class_names, digits.shape)
    assert acts.missing_inputs(rules.parse(votes[0]), broadcast) == []
    assert acts.missing_inputs(rules.parse(votes[1]), broadcast) == ["features"]


class Accuracy(EnsembleRule):
    """A rule of a plug-in that clients measure their networks for, whatever the head."""

    @property
    def needs(self) -> Needs:
        return Needs(network=True)

    def statistics(self, classes: int, features: int) -> dict[str, tuple[int, ...]]:
        return {"logits": (60, classes)}

    def judge(self, logits: torch.Tensor, labels: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
        return {"logits": logits}


@pytest.mark.parametrize("head", ["prototypes", "linear"])
def test_a_rule_judges_the_scores_that_the_network_gives(digits: Dataset, head: str) -> None:
    broadcast = prepared(digits, model__head=head, fusion=["average"], objective__terms={"cross-entropy": {}})
    asking = replace(broadcast, recipe=broadcast.recipe.model_copy(update={"fusion": [Accuracy()]}))
    site = some(digits, 60)
    upload = acts.train(asking, site)
    net = network_from(broadcast.recipe.encoder, 1, 10, upload.weights).eval()
    with torch.no_grad():
        expected = net((site.data.pixels.float() / 255 - 0.5) / 0.5)  # type: ignore[union-attr]
    assert torch.allclose(upload.statistics["logits"], expected, atol=1e-5)
