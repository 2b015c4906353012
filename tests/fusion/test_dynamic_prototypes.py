"""Prototypes that count by what each client knows of a class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import small_recipe
from oneround import acts
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.evaluate import score_uploads
from oneround.fusion import rules
from oneround.fusion.dynamic_prototypes import optimised, reliability
from oneround.global_model import GlobalModel
from oneround.protocol import Broadcast, Upload
from oneround.runs.folder import RunFolder
from oneround.server.plan import DealtPlan
from oneround.simulate import run
from oneround.site import Site
from oneround.training.alignment.anchors import anchors
from two_clients import broadcast_of, features_of, scores, uploads_of

Federation = tuple[Recipe, Broadcast, list[Upload]]


@pytest.mark.parametrize("by", ["size", "count", "reliability"])
def test_prototypes_are_weighed_as_the_formula_says(by: str, digits: Dataset) -> None:
    rule = rules.parse({"kind": "dynamic-prototypes", "by": by})
    broadcast = broadcast_of(digits, rule.dump())
    uploads = uploads_of(digits, broadcast)
    known = []
    for upload in uploads:
        counts = upload.class_counts.numpy().astype(float)
        if by == "size":
            known.append(counts.sum() * (counts > 0))
        elif by == "count":
            known.append(counts)
        else:
            statistics = {name: value.numpy() for name, value in upload.statistics.items()}
            known.append(statistics["reliability"] * counts * statistics["confidence"])
    weights = np.stack(known)[:, :, None]
    assert (weights[0, 5:] == 0).all() and (weights[1, :3] == 0).all(), "what a client never saw has no weight"
    every = np.stack([upload.weights["prototypes"].numpy() for upload in uploads])
    mean = (weights * every).sum(0) / weights.sum(0)
    fused = sum(upload.samples * features_of(upload, broadcast, digits) for upload in uploads)
    expected = F.normalize(fused, dim=1).double() @ torch.from_numpy(mean).double().T
    assert torch.allclose(scores(rule, uploads, broadcast, digits).double(), expected, atol=1e-4)
    poisoned = Upload(**{**vars(uploads[1]), "weights": {**uploads[1].weights, "prototypes": every_but(uploads[1], 0)}})
    assert torch.equal(
        scores(rule, [uploads[0], poisoned], broadcast, digits), scores(rule, uploads, broadcast, digits)
    )


def every_but(upload: Upload, label: int) -> Tensor:
    """Its prototypes, with one of a class it never saw moved far away."""
    moved = upload.weights["prototypes"].clone()
    assert upload.class_counts[label] == 0
    moved[label] += 100
    return moved


def test_a_class_nobody_knows_has_the_plain_mean(digits: Dataset) -> None:
    rule = rules.parse({"kind": "dynamic-prototypes", "by": "count"})
    broadcast = broadcast_of(digits, rule.dump())
    one, other = uploads_of(digits, broadcast)
    blind = [
        replace(upload, class_counts=upload.class_counts.index_fill(0, torch.tensor([4]), 0)) for upload in (one, other)
    ]
    fused = sum(upload.samples * features_of(upload, broadcast, digits) for upload in blind)
    mean = (one.weights["prototypes"][4] + other.weights["prototypes"][4]) / 2
    expected = F.normalize(fused, dim=1) @ mean
    assert torch.allclose(scores(rule, blind, broadcast, digits)[:, 4], expected, atol=1e-4)


def test_a_client_is_judged_class_by_class() -> None:
    labels = torch.tensor([0] * 8 + [1] * 2)
    logits = torch.zeros(10, 3)
    logits[:8, 0] = logits[8:, 0] = 2.0  # always says 0
    statistics = reliability(logits, labels, 3)
    share = float(torch.tensor([2.0, 0, 0]).softmax(0)[0])
    assert float(statistics["reliability"]) == pytest.approx(0.5), "not 0.8: every class counts alike"
    assert statistics["confidence"].tolist() == pytest.approx([share, (1 - share) / 2, (share + (1 - share) / 2) / 2])


def test_optimised_prototypes_descend_what_they_say() -> None:
    random = torch.Generator().manual_seed(0)
    each = F.normalize(torch.randn(3, 5, 12, generator=random), dim=2)
    known = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 1]]).float()
    start = anchors.parse("etf").make(5, 12, 0)
    point = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([point], lr=1e-3)
    labels = torch.arange(5).expand(3, 5)
    for _ in range(20):
        optimizer.zero_grad()
        entropy = F.cross_entropy((each @ point.T).flatten(0, 1), labels.flatten(), reduction="none")
        ((entropy * known.flatten()).sum() / known.sum() + 0.1 * F.mse_loss(point, start)).backward()
        optimizer.step()
    assert torch.allclose(optimised(each, known, start), point, atol=1e-5)
    assert torch.equal(optimised(each + 9 * (1 - known)[:, :, None], known, start), optimised(each, known, start))


def test_optimised_prototypes_are_near_those_by_count_without_anchors(federation: Federation, digits: Dataset) -> None:
    _, broadcast, uploads = federation
    chosen = {by: rules.parse({"kind": "dynamic-prototypes", "by": by}) for by in ("count", "optimised")}
    scored = score_uploads(chosen, uploads, broadcast, digits.test, Site("server")).rules
    assert scored["optimised"].accuracy > scored["count"].accuracy - 0.04
    assert scored["count"].accuracy > 0.2, "well above the 0.1 of an answer at random"


OPTIMISED = {"kind": "dynamic-prototypes", "by": "optimised"}


@pytest.mark.slow
@pytest.mark.parametrize("fusion", [OPTIMISED, {"kind": "split", "inner": OPTIMISED, "restate": "none"}])
def test_optimised_prototypes_start_at_the_anchors_of_the_broadcast(
    fusion: dict[str, object], digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = rules.parse(fusion)
    recipe = acts.resolve(small_recipe("etf", seeds__initialisation=7, fusion=[rule.dump()]), digits)
    broadcast = acts.prepare(recipe, digits.class_names, digits.shape)
    uploads = uploads_of(digits, broadcast)
    model = acts.fuse(uploads, broadcast, rule=rule)
    model.save(tmp_path / "model")
    images = digits.test.pixels[:40].float() / 255
    expected = model(images)
    for streamed in (False, True):
        assert torch.equal(GlobalModel.load(tmp_path / "model", streamed=streamed)(images), expected)
    moved = GlobalModel.of(rule.fuse(uploads, elsewhere(broadcast), Site("server")), rule, broadcast)
    assert not torch.allclose(moved(images), expected, atol=0.1), "other anchors are another start"
    assert model.to_onnx(tmp_path / "model.onnx") < 1e-4
    monkeypatch.setattr("oneround.fusion.dynamic_prototypes.STEPS", 0)
    loaded = GlobalModel.load(tmp_path / "model")
    lengths = loaded(images).norm(dim=1)
    assert torch.equal(loaded.inference.rule.anchors, broadcast.extras["anchors"])
    assert (lengths <= 1.1).all(), "unit features against the anchors themselves, a tight frame of unit rows"
    if rule.kind == "dynamic-prototypes":
        fused = F.normalize(sum(upload.samples * features_of(upload, broadcast, digits) for upload in uploads), dim=1)
        assert torch.allclose(loaded(images), fused @ broadcast.extras["anchors"].T, atol=1e-5)


def elsewhere(broadcast: Broadcast) -> Broadcast:
    """The same broadcast with its anchors turned round."""
    return replace(broadcast, extras={**broadcast.extras, "anchors": -broadcast.extras["anchors"]})


def test_optimised_prototypes_leave_out_what_a_client_never_saw(digits: Dataset) -> None:
    rule = rules.parse({"kind": "dynamic-prototypes", "by": "optimised"})
    broadcast = broadcast_of(digits, rule.dump())
    one, other = uploads_of(digits, broadcast)
    poisoned = Upload(**{**vars(other), "weights": {**other.weights, "prototypes": every_but(other, 0)}})
    assert torch.equal(scores(rule, [one, poisoned], broadcast, digits), scores(rule, [one, other], broadcast, digits))


def test_clients_are_judged_on_their_own_images_also_beside_public_ones(digits: Dataset) -> None:
    recipe = small_recipe("fafi+dynamic-prototypes", public=0.2, snapshots=0)
    plan = DealtPlan.of(recipe, digits)
    assert all(
        len(validation)
        for validation, size in zip(plan.split.client_validation, plan.split.sizes, strict=True)
        if size > 10
    )
    assert not any("choose the snapshot" in remark for remark in plan.remarks()), (
        "one snapshot leaves nothing to choose"
    )
    several = DealtPlan.of(small_recipe("fafi+dynamic-prototypes", snapshots=1, training__epochs=2), digits)
    assert any("choose the snapshot" in remark for remark in several.remarks())


@pytest.mark.slow
def test_wrong_labels_show_on_a_clients_validation_images(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(
        "fafi+dynamic-prototypes", model__encoder={"kind": "cnn", "width": 8}, training__epochs=8, partition__kind="iid", partition__clients=4,
        label_noise={"clients": 1, "share": 0.6}, validation=0.2, local__workers=1, snapshots=0, training__augment__crop_scale=[0.6, 1.0],
    )  # fmt: skip
    run(recipe, tmp_path, data=digits)
    plan = DealtPlan.of(recipe, digits)
    lies = [(plan.data.train.labels != digits.train.labels)[own].any().item() for own in plan.split.clients]
    judgements = {upload.client: float(upload.statistics["reliability"]) for upload in RunFolder(tmp_path).uploads()}
    worst = min(judgements, key=lambda name: judgements[name])
    assert worst == f"client_{lies.index(True):03d}", judgements
