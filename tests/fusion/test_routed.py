"""Ridge-routed experts: the formula, the choice on validation images, and that a weak partner is dropped."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from oneround import acts
from oneround.config.recipe import Local, Recipe
from oneround.data import Dataset, Images
from oneround.evaluate import score_model, score_uploads
from oneround.fusion import rules
from oneround.fusion.fedsra import FedSRA
from oneround.fusion.routed import DEFAULTS, Routed, Routing, Setting
from oneround.global_model import GlobalModel
from oneround.models.linear import Linear
from oneround.models.prototype import network_from
from oneround.protocol import Broadcast, Upload
from oneround.site import Site
from oracle import softmax

Federation = tuple[Recipe, Broadcast, list[Upload]]
CPU = Local(device="cpu")


@pytest.fixture(scope="module")
def validation(digits: Dataset) -> Images:
    """To choose by: test images that the tests below do not score on."""
    return digits.test.take(np.arange(0, 200))


@pytest.fixture(scope="module")
def scored(digits: Dataset) -> Images:
    return digits.test.take(np.arange(200, len(digits.test)))


def fused(
    federation: Federation, uploads: Sequence[Upload], validation: Images | None, **options: object
) -> GlobalModel:
    server = Site("server", local=CPU, validation=validation)
    return acts.fuse(uploads, federation[1], server, rules.parse({"kind": "routed", **options}))


def accuracy(model: GlobalModel, images: Images) -> float:
    return score_model(model, images, torch.device("cpu")).accuracy


def setting_of(model: GlobalModel) -> Setting:
    routing = model.inference.rule
    assert isinstance(routing, Routing)
    return routing.setting


@pytest.mark.parametrize("options", [{"temperature": 0.3, "trust": 2.0, "eta": 0.7}, {"trust": 0.0, "eta": 0.0}])
def test_the_score_is_its_formula(federation: Federation, digits: Dataset, options: dict[str, float]) -> None:
    _, broadcast, uploads = federation
    pixels = digits.test.pixels[:40]
    with torch.no_grad():
        ridge = softmax(acts.fuse(uploads, broadcast, rule=rules.parse("ridge"))(pixels.float() / 255).double().numpy())
        found = softmax(fused(federation, uploads, None, **options)(pixels.float() / 255).double().numpy())
    counts = np.stack([upload.class_counts.numpy() for upload in uploads])
    trusted = ridge ** options["trust"]
    trusted /= trusted.sum(1, keepdims=True)
    answer = 0
    for upload, own in zip(uploads, counts, strict=True):
        net = network_from(broadcast.recipe.encoder, 1, 10, upload.weights).double().eval()
        with torch.no_grad():
            logits = net((pixels.double() / 255 - 0.5) / 0.5).numpy()
        asked = trusted @ (own / counts.sum(0))
        answer = answer + asked[:, None] * softmax(logits / options.get("temperature", DEFAULTS.temperature))
    expected = ridge ** options["eta"] * answer
    assert np.abs(found - expected / expected.sum(1, keepdims=True)).max() < 1e-4


def test_standardised_features_take_the_place_of_the_experts_own_scores(
    federation: Federation, digits: Dataset
) -> None:
    """A client that holds everything, alone: its posterior is FedSRA's of its own upload."""
    _, broadcast, uploads = federation
    images = digits.test.pixels[:60].float() / 255
    options = {"posterior": "standardised", "temperature": 1.0, "trust": 0.0, "eta": 0.0}
    with torch.no_grad():
        one = fused(federation, uploads[:1], None, **options)(images).softmax(1)
        other = acts.fuse(uploads[:1], broadcast, rule=rules.parse("fedsra"))(images).softmax(1)
        plain = fused(federation, uploads[:1], None, **{**options, "posterior": "prototypes"})(images).softmax(1)
    assert float((one - other).abs().max()) < 1e-4 < float((one - plain).abs().max())
    assert rules.parse({"kind": "routed"}).statistics(10, 16) == {}
    assert rules.parse({"kind": "routed", **options}).statistics(10, 16) == FedSRA().statistics(10, 16)


def test_with_typicality_and_no_trust_it_is_the_typicality_gate_up_to_how_clients_are_weighed(
    federation: Federation, digits: Dataset
) -> None:
    """Clients of the same size that hold all classes alike are asked alike: then both rules are one."""
    _, broadcast, uploads = federation
    alike = [replace(upload, class_counts=torch.full((10,), 30)) for upload in uploads]
    images = digits.test.pixels[:60].float() / 255
    with torch.no_grad():
        one = fused(federation, alike, None, posterior="typicality", trust=0.0, eta=0.0, beta=1.0)(images).softmax(1)
        other = acts.fuse(alike, broadcast, rule=rules.parse("typicality-gated"))(images).softmax(1)
    assert float((one - other).abs().max()) < 1e-4


def test_validation_images_choose(federation: Federation, validation: Images, scored: Images) -> None:
    uploads = federation[2]
    chosen, default = fused(federation, uploads, validation), fused(federation, uploads, None)
    assert setting_of(default) == DEFAULTS != setting_of(chosen)
    assert accuracy(chosen, validation) >= accuracy(default, validation)
    pinned = fused(federation, uploads, validation, eta=0.25)
    assert setting_of(pinned).eta == 0.25
    scores, *_ = score_uploads(
        {"routed": Routed()}, uploads, federation[1], scored, Site("server", local=CPU, validation=validation)
    )
    assert scores["routed"].accuracy == accuracy(chosen, scored)


def test_experts_that_know_nothing_leave_the_ridge(federation: Federation, validation: Images, scored: Images) -> None:
    _, broadcast, uploads = federation
    ridge = accuracy(acts.fuse(uploads, broadcast, rule=rules.parse("ridge")), scored)
    random = torch.Generator().manual_seed(0)
    lost = [
        replace(
            u, weights={**u.weights, "prototypes": 30 * torch.randn(u.weights["prototypes"].shape, generator=random)}
        )
        for u in uploads
    ]
    assert accuracy(fused(federation, lost, None), scored) < ridge - 0.05, "without a choice they do harm"
    assert accuracy(fused(federation, lost, validation), scored) >= ridge - 0.01


def test_a_ridge_that_knows_nothing_leaves_the_experts(
    federation: Federation, validation: Images, scored: Images
) -> None:
    _, _, uploads = federation
    random = torch.Generator().manual_seed(0)
    lost = []
    for upload in uploads:
        order = torch.randperm(96, generator=random)
        lost.append(replace(upload, sums={**upload.sums, "cross": 50 * upload.sums["cross"][order]}))
    experts = accuracy(fused(federation, uploads, None, trust=0.0, eta=0.0), scored)
    assert accuracy(fused(federation, lost, None, trust=1.0, eta=2.0), scored) < experts - 0.05
    assert accuracy(fused(federation, lost, validation), scored) >= experts - 0.02


@pytest.mark.slow
def test_the_ridge_is_asked_once_whatever_the_networks_and_the_rules(
    federation: Federation, validation: Images, scored: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots differ in their networks, not in their sums; other sums or other images are another question."""
    _, broadcast, uploads = federation
    looked: list[int] = []
    plain = Linear._scores
    monkeypatch.setattr(Linear, "_scores", lambda self, images: looked.append(len(images)) or plain(self, images))
    three = {name: rules.parse({"kind": name, **more}) for name, more in (("routed", {}), ("ridge", {}))}
    three["gated"] = rules.parse({"kind": "routed", "posterior": "typicality"})
    first_server, second_server = (Site("server", local=CPU, validation=validation) for _ in range(2))

    def score(sent: Sequence[Upload], images: Images, server: Site = first_server) -> dict[str, float]:
        looked.clear()
        found = score_uploads(three, sent, broadcast, images, server, None, validation)
        return {name: each.loss for name, each in (found.rules | found.clients).items()}

    first = score(uploads, scored)
    assert sum(looked) == len(scored) + len(validation)
    others = [replace(upload, weights=uploads[0].weights) for upload in uploads]
    second = score(others, scored)
    assert looked == [] and second["ridge"] == first["ridge"]
    assert second[uploads[1].client] != first[uploads[1].client], "the networks are other ones"
    assert score(uploads, scored, second_server) == first
    assert sum(looked) == len(scored) + len(validation), "a fresh site has a fresh session and asks again"
    fewer = score(uploads[1:], scored)
    assert sum(looked) == len(scored) + len(validation) and fewer["ridge"] != first["ridge"]
    some = scored.take(np.arange(50))
    clear = score(uploads[1:], some)
    assert sum(looked) == 50
    some.pixels.copy_(255 - some.pixels)
    assert score(uploads[1:], some)["ridge"] != clear["ridge"], "the same tensor, other images"


def test_a_student_is_taught_through_the_ridge(federation: Federation, validation: Images, scored: Images) -> None:
    """Inversions are images made by gradients through the teacher, so nothing of it may be kept for inference alone."""
    _, broadcast, uploads = federation
    server = Site("server", local=CPU, validation=validation)
    score_uploads({"routed": rules.parse("routed")}, uploads, broadcast, scored, server)
    options = {"kind": "distilled", "teacher": "routed", "images": "inversions", "made_up": 32, "epochs": 1}
    student = acts.fuse(uploads, broadcast, server, rules.parse(options))
    assert np.isfinite(score_model(student, scored, torch.device("cpu")).loss)


def test_settings_are_judged_by_what_each_of_them_predicts() -> None:
    """Whatever they share: the weights of the experts are not added up anew for every setting."""
    random = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    labels, initial = torch.arange(30) % 4, Routing._initial(draw(30, 4).log_softmax(1))
    views = [(draw(30, 1).abs(), draw(30, 4), draw(4).abs()) for _ in range(3)]
    settings = [
        Setting(*values) for values in itertools.product((0.5, 2.0), (0.0, 2.0), (0.0, 1.0), (0.25, 2.0), (1.0, 0.0))
    ]
    routing = Routing(None, torch.ones(4), DEFAULTS, "typicality")  # type: ignore[arg-type]
    performance, seen = routing.performance((initial, views), labels), set()
    for setting in settings:
        totals = initial
        for view in views:
            totals = Routing._fold(totals, view, setting)
        scores = Routing._combine(totals, setting)
        expected = float((scores.argmax(1) == labels).float().mean()), -float(cross_entropy(scores, labels))
        assert performance(setting) == pytest.approx(expected, abs=1e-5), setting
        seen.add(expected)
    assert len(seen) > 16, "they differ"
