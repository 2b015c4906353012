"""Base and head: how much is shared, what is averaged, and what a client goes on with."""

from __future__ import annotations

import html
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from conftest import small_recipe
from oneround import acts
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.fusion import rules
from oneround.fusion.average import average_weights
from oneround.fusion.split import SplitExperts
from oneround.global_model import GlobalModel
from oneround.models.blocks import blocks
from oneround.models.prototype import build
from oneround.protocol import Broadcast, Upload
from oneround.report import report
from oneround.runs.folder import RunFolder
from oneround.simulate import run
from oneround.site import Site
from oneround.training.shared_base import shared_blocks, similarity


def test_alike_is_one_minus_the_distance_of_labels() -> None:
    counts = torch.tensor([[10, 0, 5], [1, 1, 1], [0, 7, 0], [20, 0, 10]])
    found = similarity(counts)
    for one in range(4):
        for other in range(4):
            expected = 1 - jensenshannon(counts[one].numpy(), counts[other].numpy(), base=2)
            assert float(found[one, other]) == pytest.approx(expected, abs=1e-6)


def test_equal_labels_share_all_blocks_and_disjoint_ones_share_one() -> None:
    equal, apart = torch.tensor([[5, 5, 0, 9]] * 3), torch.eye(4)[:3] * 7
    for chosen in ("all", "each"):
        assert shared_blocks(equal, 10, chosen) == [9, 9, 9]  # the last block is the prototypes: never shared
        assert shared_blocks(apart, 10, chosen) == [1, 1, 1]
    assert shared_blocks(equal[:1], 10, "all") == [9]
    assert shared_blocks(torch.ones(2, 4), 10, "client") == [9, 9] and shared_blocks(apart, 10, "client") == [1, 1, 1]
    mixed = torch.tensor([[8, 0, 0, 0], [8, 1, 0, 0], [0, 0, 3, 3]])
    assert shared_blocks(mixed, 10, "each")[0] > shared_blocks(mixed, 10, "each")[2] == 1
    assert len(set(shared_blocks(mixed, 10, "client"))) == 1, "only what every client shares is averaged"


@pytest.fixture(scope="module")
def federation(digits: Dataset) -> tuple[Broadcast, list[Upload]]:
    recipe = acts.resolve(small_recipe(training__epochs=2), digits)
    broadcast = acts.prepare(recipe, digits.class_names, digits.shape)
    labels = digits.train.labels
    holds = [torch.nonzero((labels >= low) & (labels < low + 6))[: 80 + 40 * low, 0] for low in (0, 1, 4)]
    return broadcast, [acts.train(broadcast, Site(f"c{k}", digits.train.take(mine))) for k, mine in enumerate(holds)]


@pytest.mark.parametrize("chosen", ["all", "each", "client", 2])
def test_shared_blocks_are_averaged_and_others_are_the_clients_own(
    chosen: str | int, federation: tuple[Broadcast, list[Upload]]
) -> None:
    broadcast, uploads = federation
    rule = rules.parse({"kind": "split", "chosen": chosen, "restate": "none"})
    experts = SplitExperts(rule, uploads, broadcast, Site("server"))
    assert chosen != 2 or experts.shared == [2, 2, 2]
    if chosen == "each":
        experts.shared = [3, 2, 1]
        experts.means = experts._means()
    for number, (expert, upload) in enumerate(zip(experts, uploads, strict=True)):
        tensors = expert.net.state_dict()
        for depth, names in enumerate(experts.blocks):
            sharers = [each for each, shared in zip(uploads, experts.shared, strict=True) if shared > depth]
            mean = average_weights(sharers) if sharers else {}
            source = mean if depth < experts.shared[number] else upload.weights
            assert all(torch.equal(tensors[name], source[name]) for name in names), (number, depth)


def test_a_number_of_blocks_needs_no_labels_and_must_leave_a_head(digits: Dataset) -> None:
    given = small_recipe(fusion=["iffi", {"kind": "split", "chosen": 3}])
    recipe = acts.resolve(given, digits)
    assert not rules.of(recipe.fusion[1]).needs.class_counts and rules.parse("split").needs.class_counts
    acts.prepare(recipe, digits.class_names, digits.shape)
    deeper = acts.resolve(small_recipe(fusion=["iffi", {"kind": "split", "chosen": 4}]), digits)
    with pytest.raises(
        RecipeError, match=r"^fusion.1.chosen = 4: cnn.* has 4 blocks, and the last one is never shared; give 1 to 3$"
    ):
        acts.prepare(deeper, digits.class_names, digits.shape)
    for wrong in (0, -1, "some"):
        with pytest.raises(
            RecipeError,
            match=rf"^fusion.0.chosen = {json.dumps(wrong)}: must be all, each, client, declared, or a number of .*from 1 on$",
        ):
            small_recipe(fusion=[{"kind": "split", "chosen": wrong}])


def test_statistics_measured_anew_are_those_of_the_images(
    digits: Dataset, federation: tuple[Broadcast, list[Upload]]
) -> None:
    broadcast, uploads = federation
    before = [upload.content for upload in uploads]
    rule = rules.parse({"kind": "split", "restate": "public"})
    public = digits.train.take(torch.arange(512))  # a batch of 500 and one of 12, which must not count as much
    expert = next(iter(SplitExperts(rule, uploads, broadcast, Site("server", public))))
    first = expert.net.encoder.convolutions[0]((public.pixels.float() / 255 - 0.5) / 0.5)
    assert torch.allclose(expert.net.encoder.norms[0].running_mean, first.mean((0, 2, 3)), atol=1e-5)
    assert [upload.content for upload in uploads] == before, "uploads are not touched"
    with pytest.raises(RecipeError, match=r"fusion.split: the server has no public images"):
        acts.fuse(uploads, broadcast, rule=rule)


def test_noise_on_the_histograms_is_honoured(digits: Dataset) -> None:
    """The server goes by the counts it receives, whatever the true ones are."""
    recipe = small_recipe(fusion=["split"], reveal__class_counts={"epsilon": 0.01})
    broadcast = acts.prepare(acts.resolve(recipe, digits), digits.class_names, digits.shape)
    holds = [torch.nonzero(digits.train.labels == label)[:20, 0] for label in (0, 1, 2)]
    uploads = [acts.train(broadcast, Site(f"c{k}", digits.train.take(mine))) for k, mine in enumerate(holds)]
    counts = torch.stack([upload.class_counts for upload in uploads])
    assert ((counts > 0).sum(1) > 1).any(), "each holds one class and says otherwise"
    rule = rules.parse({"kind": "split", "chosen": "each", "restate": "none"})
    shared = SplitExperts(rule, uploads, broadcast, Site("server")).shared
    assert shared == shared_blocks(counts, len(blocks(build(broadcast.recipe.model.encoder, 1, 10))), "each")


def test_hidden_histograms_leave_nothing_to_be_personal_about(digits: Dataset, tmp_path: Path) -> None:
    run(small_recipe(fusion=["iffi"], reveal__class_counts=False, local__workers=1), tmp_path / "run", data=digits)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["personalised"] == {}


def test_a_run_is_judged_globally_and_on_every_clients_own_mix(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe("split", training__epochs=3, snapshots=0, local__workers=1, partition__alpha=0.3)
    result = run(recipe, tmp_path / "run", data=digits)
    result_json = json.loads((tmp_path / "run" / "result.json").read_text())
    split = next(iter(result_json["rules"]))
    assert set(result_json["personalised"]) == {*result_json["rules"], "alone", f"{split}, personal"}
    assert result.personalised["alone"] == pytest.approx(np.mean(list(result_json["personalised"]["alone"].values())))
    page = report([tmp_path / "run"])
    for name, by_client in result_json["personalised"].items():
        assert f"{html.escape(name)}, %" in page and all(f"{100 * value:.2f}" in page for value in by_client.values())
    uploads = RunFolder(tmp_path / "run").uploads()
    personal = dict(rules.of(recipe.fusion[0]).personal(uploads, uploads.broadcast, Site("server")))
    for upload in uploads:
        counts = upload.class_counts.numpy()
        right = result_json["clients"][upload.client]["per_class"]
        assert result_json["personalised"]["alone"][upload.client] == pytest.approx(np.average(right, weights=counts))
        model = GlobalModel.of(personal[upload.client], rules.of(recipe.fusion[0]), uploads.broadcast)
        correct = (model.predict(digits.test.pixels).argmax(1) == digits.test.labels).numpy()
        each = [correct[(digits.test.labels == label).numpy()].mean() for label in range(10)]
        expected = np.average(each, weights=counts)
        assert result_json["personalised"][f"{split}, personal"][upload.client] == pytest.approx(expected)
    again = GlobalModel.load(tmp_path / "run" / "model")
    score = float((again.predict(digits.test.pixels).argmax(1) == digits.test.labels).float().mean())
    assert score == pytest.approx(result_json["rules"][split]["accuracy"])


def test_an_inner_rule_that_does_not_fit_is_refused() -> None:
    for inner in ("average", "typicality-gated", "distilled"):
        with pytest.raises(RecipeError, match="must be a rule that keeps networks and asks for no statistics"):
            load("split", [("fusion", [{"kind": "split", "inner": inner}])])


def test_bases_averaged_heads_aligned_and_distilled(
    digits: Dataset, federation: tuple[Broadcast, list[Upload]]
) -> None:
    """Differentiated aggregation is a composition of the three."""
    broadcast, uploads = federation
    teacher = {"kind": "split", "align": "match"}
    rule = rules.parse({"kind": "distilled", "teacher": teacher, "epochs": 2, "images": "noise", "made_up": 128})
    model = acts.fuse(uploads, broadcast, rule=rule)
    assert model.predict(digits.test.pixels[:5]).shape == (5, 10)
    assert sum(1 for _ in model.inference.shards()) == 1
