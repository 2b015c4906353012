"""Scores count right, and many rules are scored in one pass as each is alone."""

from __future__ import annotations

import weakref

import pytest
import torch

from conftest import NETWORK_RULES
from oneround import acts, evaluate
from oneround.data import Dataset
from oneround.evaluate import Score, score_model, score_uploads
from oneround.fusion import EnsembleRule, rules
from oneround.global_model import GlobalModel
from oneround.models.inference import ExpertOutput
from oneround.site import Site
from oracle import Federation


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

    def add(self, totals: dict[str, torch.Tensor] | None, output: ExpertOutput) -> dict[str, torch.Tensor]:
        assert totals is not None
        return {"votes": totals["votes"] + output.logits}

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


def test_scoring_holds_one_network_at_a_time(
    federation: Federation, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count live encoders while two hundred uploads are scored."""
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
