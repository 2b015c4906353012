"""Several rounds: what is fused goes out again, whoever carries it, stopped and resumed, with some clients or all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import run_in_parts, small_recipe
from federation import NOW
from inprocess import InProcess
from oneround import acts
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.federate.server_app import serve
from oneround.fusion.average import average_weights
from oneround.protocol import Broadcast, Upload
from oneround.runs.folder import RunFolder
from oneround.server.plan import DealtPlan
from oneround.simulate import run
from oneround.site import Site
from run_files import final


def fedavg(**changes: Any) -> Recipe:
    """Three rounds of one epoch on digits, three clients, a narrow network."""
    few = {"rounds": 3, "training__schedule": "constant", "training__milestones": [], "partition__clients": 3}
    return small_recipe("fedavg", **{**few, "partition__alpha": 1.0, "local__workers": 1, **changes})


def test_a_round_begins_with_the_average_of_the_one_before(digits: Dataset, tmp_path: Path) -> None:
    recipe = fedavg(rounds=2)
    result = run(recipe, tmp_path, data=digits)
    plan = DealtPlan.of(recipe, digits)
    broadcast = plan.prepare()
    sites = [Site(name, digits.train.take(plan.split.clients[at])) for name, at in plan.clients.items()]
    first = [acts.train(broadcast, site) for site in sites]
    middle = acts.advance(acts.fuse(first, broadcast), broadcast)
    assert torch.equal(middle.weights["prototypes"], average_weights(first)["prototypes"])
    second = [acts.train(middle, site) for site in sites]
    assert [upload.epoch for upload in second] == [2, 2, 2]
    for mine, theirs in zip(second, RunFolder(tmp_path).uploads(), strict=True):
        assert mine.content == theirs.content
    assert result.curves["average"].keys() == {1, 2}


def test_shuffles_and_views_differ_from_round_to_round(digits: Dataset) -> None:
    plan = DealtPlan.of(fedavg(rounds=2), digits)
    broadcast = plan.prepare()
    again = acts.advance(acts.fuse([_unmoved(broadcast)], broadcast), broadcast)
    assert all(torch.equal(value, again.weights[name]) for name, value in broadcast.weights.items())
    site = Site("client_000", digits.train.take(plan.split.clients[0]))
    one, two = acts.train(broadcast, site), acts.train(again, site)
    assert not torch.equal(one.weights["prototypes"], two.weights["prototypes"])


def _unmoved(broadcast: Broadcast) -> Upload:
    counts = torch.ones(broadcast.classes, dtype=torch.int64)
    return Upload("client_000", broadcast.digest, 1, counts, broadcast.weights)


@pytest.mark.slow
def test_stopped_at_any_epoch_and_resumed_it_ends_the_same(digits: Dataset, tmp_path: Path) -> None:
    recipe = fedavg(training__epochs=2, local__checkpoint_seconds=0.0)
    run(recipe, tmp_path / "whole", data=digits)
    assert run_in_parts(recipe, tmp_path / "parts", digits) >= 6
    whole, parts = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts"))
    assert whole == parts


@pytest.mark.slow
def test_a_second_round_is_the_same_undisturbed_resumed_and_federated(digits: Dataset, tmp_path: Path) -> None:
    """Progressive anchors begin at the prototypes of this round's broadcast, in whichever process a client goes on."""
    recipe = small_recipe(
        "etf-progressive", rounds=2, training__epochs=2, partition__clients=2, partition__alpha=1.0, fusion=["average"],
        snapshots=0, local__workers=1, local__checkpoint_seconds=0.0,
    )  # fmt: skip
    run(recipe, tmp_path / "whole", data=digits)
    assert run_in_parts(recipe, tmp_path / "parts", digits) >= 3
    sites = {node: {"partition-id": node, "num-partitions": 2} for node in range(2)}
    serve(InProcess(sites), recipe, tmp_path / "federated", NOW)
    whole, parts, federated = (final(tmp_path / name) for name in ("whole", "parts", "federated"))
    assert whole == parts
    assert (whole["uploads"], whole["rules"]) == (federated["uploads"], federated["rules"])


def test_some_clients_are_drawn_anew_every_round(digits: Dataset, tmp_path: Path) -> None:
    recipe = fedavg(rounds=4, partition__clients=4, participation__fraction=0.5)
    plan = DealtPlan.of(recipe, digits)
    drawn = [plan.participants(number) for number in range(1, 5)]
    assert all(len(names) == 2 for names in drawn) and len({tuple(names) for names in drawn}) > 1
    run(recipe, tmp_path, data=digits)
    result = json.loads((tmp_path / "result.json").read_text())
    assert sorted(result["uploads"]) == drawn[-1]
    assert sum(each["up"] for each in result["traffic"].values()) == 8 * plan.traffic.up == result["bytes_up"]
    assert {path.stem for path in (tmp_path / "uploads").iterdir()} == set(drawn[-1])
    assert acts.participants(plan.recipe.model_copy(update={"rounds": 1}), list(plan.clients), 1) == list(plan.clients)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fusion": ["logit-ensemble"]}, "rounds = 3: logit-ensemble makes no network that a next round could start from"),
        ({"rounds": 1, "participation__fraction": 0.5}, "with one round everybody takes part"),
        ({"fusion": ["average", "iffi"]}, "model.head = linear: fusion rule iffi compares features with prototypes"),
        ({"alignment": {"anchors": "etf"}}, "model.head = linear: alignment pulls prototypes"),
        ({"rounds": 0}, "rounds = 0"),
        ({"participation__fraction": 0.0}, "participation.fraction = 0"),
    ],
)  # fmt: skip
def test_what_several_rounds_rule_out(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        fedavg(**changes)


def test_an_upload_of_another_round_is_refused(digits: Dataset) -> None:
    plan = DealtPlan.of(fedavg(), digits)
    broadcast = plan.prepare()
    upload = acts.train(broadcast, Site("client_000", digits.train.take(plan.split.clients[0])))
    third = acts.advance(acts.fuse([upload], broadcast), acts.advance(acts.fuse([upload], broadcast), broadcast))
    with pytest.raises(Exception, match="at epoch 1; expected 2 to 3"):
        Upload.unpack(upload.pack(), third, {})
