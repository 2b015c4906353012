"""Every rule against its formula, written out directly in float64 numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.covariance import oas as sklearn_oas

from conftest import NETWORK_RULES
from oneround import acts
from oneround.data import Dataset
from oneround.evaluate import Score, score_model, score_uploads
from oneround.fusion import EnsembleRule, rules, typicality
from oneround.fusion.average import average_weights
from oneround.models.inference import Seen
from oneround.models.prototype import filled
from oneround.protocol import Broadcast, GlobalModel, Upload
from oneround.recipe import Recipe
from oneround.seeds import generator
from oneround.site import Site

Federation = tuple[Recipe, Broadcast, list[Upload]]
N = 60


class Oracle:
    """What each client's network says about some test images, in float64."""

    def __init__(self, federation: Federation, digits: Dataset) -> None:
        _, self.broadcast, self.uploads = federation
        self.pixels = digits.test.pixels[:N]
        images = (self.pixels.double() / 255 - 0.5) / 0.5
        noise = torch.randn(1, 1, 8, 8, generator=generator(1, "noise image")).double()
        self.f, self.noise, self.p, self.n, self.counts = [], [], [], [], []
        for upload in self.uploads:
            net = filled(self.broadcast.recipe.model.encoder, 1, 10, upload.weights).double().eval()
            with torch.no_grad():
                self.f.append(net.encoder(images).numpy())
                self.noise.append(net.encoder(noise).numpy()[0])
            self.p.append(upload.weights["prototypes"].double().numpy())
            self.n.append(upload.samples)
            self.counts.append(upload.class_counts.numpy())
        self.z = [f / np.linalg.norm(f, axis=1, keepdims=True) for f in self.f]
        self.logits = [z @ p.T for z, p in zip(self.z, self.p, strict=True)]

    def scores(self, kind: str | dict[str, object]) -> np.ndarray:
        model = acts.fuse(self.uploads, self.broadcast, rule=rules.parse(kind))
        with torch.no_grad():
            return model(self.pixels.float() / 255).numpy()


@pytest.fixture(scope="module")
def oracle(federation: Federation, digits: Dataset) -> Oracle:
    return Oracle(federation, digits)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_iffi(oracle: Oracle) -> None:
    total = sum(oracle.n)
    fused = sum(n / total * f for n, f in zip(oracle.n, oracle.f, strict=True))
    fused /= np.linalg.norm(fused, axis=1, keepdims=True)
    assert np.abs(oracle.scores("iffi") - fused @ np.mean(oracle.p, 0).T).max() < 1e-4


def test_informative_iffi(oracle: Oracle) -> None:
    def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ b / np.linalg.norm(a, axis=1) / np.linalg.norm(b)

    w = np.stack([1 - cosine(f, e) for f, e in zip(oracle.f, oracle.noise, strict=True)])
    assert w.std(0).max() > 1e-3
    w /= w.sum(0)
    fused = sum(w[k][:, None] * oracle.f[k] for k in range(3))
    fused /= np.linalg.norm(fused, axis=1, keepdims=True)
    assert np.abs(oracle.scores("informative-iffi") - fused @ np.mean(oracle.p, 0).T).max() < 1e-4


def test_logit_ensemble(oracle: Oracle) -> None:
    wanted = sum(n * logits for n, logits in zip(oracle.n, oracle.logits, strict=True)) / sum(oracle.n)
    assert np.abs(oracle.scores("logit-ensemble") - wanted).max() < 1e-4


@pytest.mark.parametrize("sharpness", [0.0, 3.0])
def test_entropy_gate(oracle: Oracle, sharpness: float) -> None:
    p = [softmax(logits) for logits in oracle.logits]
    gates = np.stack([n * np.exp(-sharpness * -(q * np.log(q)).sum(1)) for n, q in zip(oracle.n, p, strict=True)])
    gates /= gates.sum(0)
    wanted = sum(gates[k][:, None] * p[k] for k in range(3))
    assert np.abs(np.exp(oracle.scores({"kind": "entropy-gated", "sharpness": sharpness})) - wanted).max() < 1e-5


def own_features(oracle: Oracle, digits: Dataset, k: int) -> tuple[np.ndarray, np.ndarray]:
    from oneround.data import partitions

    index = partitions.of(oracle.broadcast.recipe.partition).split(digits, 1).clients[k]
    mine = digits.train.take(index)
    net = filled(oracle.broadcast.recipe.model.encoder, 1, 10, oracle.uploads[k].weights).double().eval()
    with torch.no_grad():
        f = net.encoder((mine.pixels.double() / 255 - 0.5) / 0.5).numpy()
    return f / np.linalg.norm(f, axis=1, keepdims=True), mine.labels.numpy()


def gaussian(z: np.ndarray, y: np.ndarray) -> tuple[dict[int, np.ndarray], np.ndarray]:
    counts = np.bincount(y, minlength=10)
    means = {c: z[y == c].mean(0) for c in range(10) if counts[c]}
    residuals = np.stack([row - means[c] for row, c in zip(z, y, strict=True)])
    covariance, _ = sklearn_oas(residuals, assume_centered=True)
    enough = min(20, counts.max())
    return {c: m for c, m in means.items() if counts[c] >= enough}, np.linalg.inv(
        covariance + 1e-6 * np.eye(z.shape[1])
    )


def mahalanobis(z: np.ndarray, means: dict[int, np.ndarray], inverse: np.ndarray) -> np.ndarray:
    far = np.full((len(z), 10), np.inf)
    for c, m in means.items():
        far[:, c] = np.einsum("ni,ij,nj->n", z - m, inverse, z - m)
    return far


@pytest.mark.parametrize(("beta", "temperature"), [(1.0, 1.0), (0.3, 5.0)])
def test_typicality_gate(oracle: Oracle, digits: Dataset, beta: float, temperature: float) -> None:
    log_gates, posteriors = [], []
    for k in range(3):
        z, y = own_features(oracle, digits, k)
        held = []
        for fold in range(5):
            out = np.arange(len(z)) % 5 == fold
            held.append(mahalanobis(z[out], *gaussian(z[~out], y[~out])).min(1))
        scale = np.concatenate(held).mean()
        far = mahalanobis(oracle.z[k], *gaussian(z, y))
        log_gates.append(np.log(oracle.n[k]) - beta * far.min(1) / scale)
        with np.errstate(divide="ignore"):
            posteriors.append(softmax((np.log(oracle.counts[k]) - far / 2) / temperature))
    gates = softmax(np.stack(log_gates, 1))
    assert gates.std(0).max() > 0.02
    wanted = sum(gates[:, k : k + 1] * posteriors[k] for k in range(3))
    found = np.exp(oracle.scores({"kind": "typicality-gated", "beta": beta, "temperature": temperature}))
    assert np.abs(found - wanted).max() < 1e-4


def test_average_includes_batch_norm_statistics(oracle: Oracle, federation: Federation) -> None:
    averaged = average_weights(oracle.uploads)
    total = sum(oracle.n)
    assert averaged.keys() == oracle.uploads[0].weights.keys()
    for name, value in averaged.items():
        wanted = sum(u.weights[name].double().numpy() * u.samples for u in oracle.uploads) / total
        assert np.abs(value.double().numpy() - wanted).max() <= (
            0.5 if value.dtype == torch.int64 else 1e-6 * max(1, np.abs(wanted).max())
        ), name
    statistics = [name for name in averaged if "running" in name]
    assert len(statistics) == 6
    fresh = federation[1].weights
    assert all(not torch.equal(averaged[name], fresh[name]) for name in statistics)


def test_average_answers_like_its_network(oracle: Oracle) -> None:
    net = filled(oracle.broadcast.recipe.model.encoder, 1, 10, average_weights(oracle.uploads)).double().eval()
    with torch.no_grad():
        wanted = net((oracle.pixels.double() / 255 - 0.5) / 0.5).numpy()
    assert np.abs(oracle.scores("average") - wanted).max() < 1e-4


def test_oas_is_scikit_learn_s() -> None:
    for n, d in ((5, 12), (200, 12), (40, 40)):
        rows = np.random.RandomState(n).randn(n, d) @ np.diag(np.linspace(0.1, 3, d))
        wanted, _ = sklearn_oas(rows, assume_centered=True)
        assert np.abs(typicality.oas(torch.from_numpy(rows)).numpy() - wanted).max() < 1e-10


def test_held_out_distances_are_larger_than_in_sample_ones() -> None:
    spread = torch.linspace(1, 0.01, 64)
    unit = torch.nn.functional.normalize(
        spread * torch.randn(60, 64, generator=torch.Generator().manual_seed(0)), dim=1
    )
    labels = torch.arange(60) % 3
    means, usable, whitening = typicality.gaussian(unit, labels, 3)
    inside = typicality.distances(unit, means, whitening).amin(1).mean()
    assert usable.all() and float(typicality.typical(unit, labels, 3)) > 1.2 * float(inside)


def test_rare_classes_do_not_count_unless_all_are_rare() -> None:
    unit = torch.randn(50, 4)
    _, usable, _ = typicality.gaussian(unit, torch.tensor([0] * 30 + [1] * 20), 3)
    assert usable.tolist() == [True, True, False]
    _, usable, _ = typicality.gaussian(unit, torch.tensor([0] * 31 + [1] * 19), 3)
    assert usable.tolist() == [True, False, False]
    _, usable, _ = typicality.gaussian(unit[:5], torch.tensor([0, 1, 1, 2, 2]), 3)
    assert usable.tolist() == [False, True, True]


def test_no_usable_class_anywhere_falls_back_to_iffi(oracle: Oracle) -> None:
    shut = [replace(u, statistics={**u.statistics, "typicality_usable": torch.zeros(10)}) for u in oracle.uploads]
    images = oracle.pixels.float() / 255
    with torch.no_grad():
        gated = acts.fuse(shut, oracle.broadcast, rule=rules.parse("typicality-gated"))(images)
        plain = acts.fuse(shut, oracle.broadcast, rule=rules.parse("iffi"))(images)
        one = acts.fuse([shut[0], oracle.uploads[1]], oracle.broadcast, rule=rules.parse("typicality-gated"))(images)
        only = acts.fuse([oracle.uploads[1]], oracle.broadcast, rule=rules.parse("typicality-gated"))(images)
    assert torch.equal(gated, plain)
    assert torch.allclose(one, only, atol=1e-5)


def test_an_image_far_from_everybody_still_gets_an_answer(oracle: Oracle) -> None:
    odd = [replace(u, statistics={**u.statistics, "typicality_scale": torch.tensor(1e-6)}) for u in oracle.uploads]
    with torch.no_grad():
        scores = acts.fuse(odd, oracle.broadcast, rule=rules.parse("typicality-gated"))(oracle.pixels.float() / 255)
    assert torch.isfinite(scores).all()


def test_all_rules_in_one_pass_are_each_rule_alone(federation: Federation, digits: Dataset) -> None:
    _, broadcast, uploads = federation
    chosen = {kind: rules.parse(kind) for kind in NETWORK_RULES}
    together, alone, _ = score_uploads(chosen, uploads, broadcast, digits.test, Site("server"))
    for kind, rule in chosen.items():
        model = acts.fuse(uploads, broadcast, rule=rule)
        assert score_model(model, digits.test, torch.device("cpu")) == together[kind]
    for upload in uploads:
        single = acts.fuse([upload], broadcast, rule=rules.parse("average"))
        assert score_model(single, digits.test, torch.device("cpu")) == alone[upload.client]


class Prejudiced(EnsembleRule):
    """A rule of somebody's own that begins with an opinion."""

    def begin(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"votes": torch.full((len(images), 10), 0.0).index_fill(1, torch.tensor([3]), 1e6)}

    def add(self, totals: dict[str, torch.Tensor] | None, seen: Seen) -> dict[str, torch.Tensor]:
        assert totals is not None
        return {"votes": totals["votes"] + seen.logits}

    def scores(self, totals: dict[str, torch.Tensor]) -> torch.Tensor:
        return totals["votes"]


def test_a_rule_that_begins_with_something_is_scored_as_it_answers(federation: Federation, digits: Dataset) -> None:
    _, broadcast, uploads = federation
    rule, server = Prejudiced(), Site("server")
    scores, *_ = score_uploads({"own": rule}, uploads, broadcast, digits.test, server)
    model = GlobalModel.of(rule.fuse(uploads, broadcast, server), rule, broadcast)
    share = float((digits.test.labels == 3).double().mean())
    assert scores["own"].accuracy == score_model(model, digits.test, server.device).accuracy == share
    assert set(model.predict(digits.test.pixels[:9]).argmax(1).tolist()) == {3}


def test_the_order_of_uploads_does_not_matter(federation: Federation, digits: Dataset) -> None:
    _, broadcast, uploads = federation
    images = digits.test.pixels[:20].float() / 255
    for kind in NETWORK_RULES:
        with torch.no_grad():
            forth, back = (
                acts.fuse(order, broadcast, rule=rules.parse(kind))(images) for order in (uploads, uploads[::-1])
            )
        assert torch.allclose(forth, back, atol=1e-5), kind


def test_scoring_holds_one_network_at_a_time(
    federation: Federation, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count live encoders while two hundred uploads are scored."""
    import weakref

    from oneround import evaluate

    _, broadcast, uploads = federation
    alive: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    most = 0
    original = evaluate.expert_of

    def counted(*given: object) -> object:
        nonlocal most
        expert = original(*given)  # type: ignore[arg-type]
        alive.add(expert)
        most = max(most, len(alive))
        return expert

    monkeypatch.setattr(evaluate, "expert_of", counted)
    many = [uploads[k % 3] for k in range(200)]
    score_uploads({"iffi": rules.parse("iffi")}, many, broadcast, digits.test.take(torch.arange(10)), Site("server"))
    assert most == 1


def test_a_score_counts_right() -> None:
    scores = torch.eye(3)[[0, 1, 1, 2, 2]]
    score = Score.of(scores, torch.tensor([0, 1, 2, 2, 2]), 4 - 1)
    assert score.accuracy == 0.8 and score.samples == 5
    assert score.confusion == ((1, 0, 0), (0, 1, 0), (0, 1, 2))
    assert score.per_class == [1.0, 1.0, 2 / 3]
    assert Score.of(scores[:2], torch.tensor([0, 1]), 3).per_class == [1.0, 1.0, None]


def test_nothing_to_fuse_is_said(federation: Federation) -> None:
    from oneround.errors import ProtocolError

    with pytest.raises(ProtocolError, match="no uploads to fuse"):
        acts.fuse([], federation[1])


def test_the_recipe_s_first_rule_makes_the_model(federation: Federation) -> None:
    _, broadcast, uploads = federation
    model: GlobalModel = acts.fuse(uploads, broadcast)
    assert model.rule.kind == "iffi"
