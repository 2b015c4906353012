"""Prototypes that count by what is known, feature spaces brought together, features that vote, labels that lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import small_recipe
from oneround import acts
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.folder import RunFolder
from oneround.fusion import Rule, rules
from oneround.fusion.aligned import matching, rotation
from oneround.fusion.prototypes import judged, optimised
from oneround.learning.anchors import anchors
from oneround.protocol import Broadcast, Upload
from oneround.runs import Plan
from oneround.simulate import run
from oneround.site import Site


def broadcast_of(digits: Dataset, *fusion: object) -> Broadcast:
    recipe = acts.settle(small_recipe(training__epochs=8, training__batch_size=16, fusion=list(fusion)), digits)
    return acts.prepare(recipe, digits.class_names, digits.shape)


def uploads_of(digits: Dataset, broadcast: Broadcast) -> list[Upload]:
    """Client a holds classes 0–4, b 3–9; nobody is asked about what it never saw."""
    labels = digits.train.labels
    holds = (torch.nonzero(labels < 5)[:120, 0], torch.nonzero(labels >= 3)[:90, 0])
    return [acts.train(broadcast, Site(name, digits.train.take(mine))) for name, mine in zip("ab", holds, strict=True)]


def scores(rule: Rule, uploads: list[Upload], broadcast: Broadcast, digits: Dataset) -> Tensor:
    return acts.fuse(uploads, broadcast, rule=rule)(digits.test.pixels[:40].float() / 255)


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
    fused = sum(upload.samples * _features(upload, broadcast, digits) for upload in uploads)
    wanted = F.normalize(fused, dim=1).double() @ torch.from_numpy(mean).double().T
    assert torch.allclose(scores(rule, uploads, broadcast, digits).double(), wanted, atol=1e-4)
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


def _features(upload: Upload, broadcast: Broadcast, digits: Dataset) -> Tensor:
    from oneround.fusion.rule import expert_of

    with torch.no_grad():
        expert = expert_of(upload, broadcast, torch.device("cpu"))
        return expert.net.encoder((digits.test.pixels[:40].float() / 255 - 0.5) / 0.5)


def test_a_class_nobody_knows_has_the_plain_mean(digits: Dataset) -> None:
    rule = rules.parse({"kind": "dynamic-prototypes", "by": "count"})
    broadcast = broadcast_of(digits, rule.dump())
    one, other = uploads_of(digits, broadcast)
    blind = [Upload(**{**vars(upload), "class_counts": upload.class_counts.index_fill(0, torch.tensor([4]), 0)}) for upload in (one, other)]  # fmt: skip
    fused = sum(upload.samples * _features(upload, broadcast, digits) for upload in blind)
    mean = (one.weights["prototypes"][4] + other.weights["prototypes"][4]) / 2
    wanted = F.normalize(fused, dim=1) @ mean
    assert torch.allclose(scores(rule, blind, broadcast, digits)[:, 4], wanted, atol=1e-4)


def test_a_client_is_judged_class_by_class() -> None:
    labels = torch.tensor([0] * 8 + [1] * 2)
    logits = torch.zeros(10, 3)
    logits[:8, 0] = logits[8:, 0] = 2.0  # always says 0
    told = judged(logits, labels, 3)
    share = float(torch.tensor([2.0, 0, 0]).softmax(0)[0])
    assert float(told["reliability"]) == pytest.approx(0.5), "not 0.8: every class counts alike"
    assert told["confidence"].tolist() == pytest.approx([share, (1 - share) / 2, (share + (1 - share) / 2) / 2])


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
    assert torch.allclose(optimised(each, known), point, atol=1e-5)
    assert torch.equal(optimised(each + 9 * (1 - known)[:, :, None], known), optimised(each, known))


def test_optimised_prototypes_leave_out_what_a_client_never_saw(digits: Dataset) -> None:
    rule = rules.parse({"kind": "dynamic-prototypes", "by": "optimised"})
    broadcast = broadcast_of(digits, rule.dump())
    one, other = uploads_of(digits, broadcast)
    poisoned = Upload(**{**vars(other), "weights": {**other.weights, "prototypes": every_but(other, 0)}})
    assert torch.equal(scores(rule, [one, poisoned], broadcast, digits), scores(rule, [one, other], broadcast, digits))


@pytest.mark.parametrize("by", ["match", "procrustes"])
def test_spaces_are_brought_together(by: str, digits: Dataset) -> None:
    """A client whose feature units are renamed (or turned) says what it said before; plain IFFI is lost then."""
    random = torch.Generator().manual_seed(3)
    source = torch.randn(10, 16, generator=random)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=random)).Q
    if by == "match":
        turn = torch.eye(16)[torch.randperm(16, generator=random)]
    found = (matching if by == "match" else rotation)(source @ turn, source)
    assert torch.allclose(source @ turn @ found, source, atol=1e-3)
    assert torch.allclose(found @ found.T, torch.eye(16), atol=1e-4)
    rule = rules.parse({"kind": "aligned-iffi", "by": by})
    broadcast = broadcast_of(digits, rule.dump())
    uploads = uploads_of(digits, broadcast)
    one = Upload(**{**vars(uploads[0]), "class_counts": torch.ones(10, dtype=torch.int64)})  # all prototypes count
    plain = rules.parse("iffi")
    alone, together, lost = (
        F.normalize(scores(each, given, broadcast, digits), dim=1)
        for each, given in ((plain, [one]), (rule, [one, renamed(one)]), (plain, [one, renamed(one)]))
    )
    assert torch.allclose(together, alone, atol=1e-3) and not torch.allclose(lost, alone, atol=0.05)


def renamed(upload: Upload) -> Upload:
    """The same network with its feature units in another order."""
    weights = dict(upload.weights)
    features = weights["prototypes"].shape[1]
    order = torch.randperm(features, generator=torch.Generator().manual_seed(4))
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.norms"))
    for name, value in upload.weights.items():
        if name.startswith((f"encoder.convolutions.{last}.", f"encoder.norms.{last}.")) and value.ndim:
            assert len(value) == features
            weights[name] = value[order]
    weights["prototypes"] = weights["prototypes"][:, order]
    return Upload(**{**vars(upload), "client": "renamed", "weights": weights})


def test_features_vote_for_their_class(digits: Dataset) -> None:
    rule = rules.parse({"kind": "feature-vote", "per_class": 3, "temperature": 0.5})
    broadcast = broadcast_of(digits, rule.dump())
    uploads = uploads_of(digits, broadcast)
    assert uploads[0].statistics["features"].shape[:2] == (10, 3)
    assert (uploads[0].statistics["features"][5:] == 0).all() and (
        uploads[0].statistics["features_weight"][5:] == 0
    ).all()
    votes = torch.zeros(40, 10).double()
    for upload in uploads:
        unit = F.normalize(_features(upload, broadcast, digits), dim=1).double()
        for label in range(10):
            sent = upload.statistics["features"][label].double()
            sent = sent[sent.norm(dim=1) > 0]
            if len(sent):
                share = float(upload.class_counts[label]) / len(sent)
                votes[:, label] += share * (unit @ sent.T / 0.5).exp().sum(1)
    assert torch.allclose(scores(rule, uploads, broadcast, digits).double(), votes.log(), atol=1e-4)


def test_wrong_labels_are_at_the_clients_asked_for(digits: Dataset) -> None:
    recipe = small_recipe(label_noise={"clients": 2, "share": 0.5}, partition__kind="iid", validation=0.1)
    plan = Plan.of(recipe, digits)
    wrong = (plan.data.train.labels != digits.train.labels).numpy()
    shares = [
        wrong[np.concatenate([own, held])].mean() for own, held in zip(plan.split.clients, plan.split.held, strict=True)
    ]
    assert sorted(round(share, 2) for share in shares) == [0, 0, 0, 0.5, 0.5]
    assert plan.split.digest == Plan.of(small_recipe(partition__kind="iid", validation=0.1), digits).split.digest
    assert any("wrong on purpose" in remark for remark in plan.remarks())
    with pytest.raises(RecipeError, match=r"label_noise.clients = 9: must be ≤ 5"):
        Plan.of(small_recipe(label_noise={"clients": 9}, partition__kind="iid"), digits)


def test_clients_are_judged_on_their_own_images_also_where_there_are_public_ones(digits: Dataset) -> None:
    recipe = small_recipe("fafi+dynamic-prototypes", public=0.2, snapshots=0)
    plan = Plan.of(recipe, digits)
    assert all(len(held) for held, size in zip(plan.split.held, plan.split.sizes, strict=True) if size > 10)
    assert not any("choose the snapshot" in remark for remark in plan.remarks()), "there is only one"
    several = Plan.of(small_recipe("fafi+dynamic-prototypes", snapshots=1, training__epochs=2), digits)
    assert any("choose the snapshot" in remark for remark in several.remarks())


def test_a_client_that_lies_is_found_out_on_what_it_held_back(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(
        "fafi+dynamic-prototypes", model__encoder={"kind": "cnn", "width": 8}, training__epochs=8, partition__kind="iid", partition__clients=4,
        label_noise={"clients": 1, "share": 0.6}, validation=0.2, local__workers=1, snapshots=0, training__augment__crop_scale=[0.6, 1.0],
    )  # fmt: skip
    run(recipe, tmp_path, data=digits)
    plan = Plan.of(recipe, digits)
    lies = [(plan.data.train.labels != digits.train.labels)[own].any().item() for own in plan.split.clients]
    judgements = {upload.client: float(upload.statistics["reliability"]) for upload in RunFolder(tmp_path).uploads()}
    worst = min(judgements, key=lambda name: judgements[name])
    assert worst == f"client_{lies.index(True):03d}", judgements
