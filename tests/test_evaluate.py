"""Scores count right, and many rules are scored in one pass as each is alone."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clients import few
from conftest import NETWORK_RULES
from oneround import acts, evaluate
from oneround.config.load import load
from oneround.data import Dataset, Images
from oneround.errors import OneroundError, RecipeError
from oneround.evaluate import Score, batch_sizes, is_transductive, score_model, score_uploads, transductive_name
from oneround.fusion import EnsembleRule, rules
from oneround.global_model import GlobalModel
from oneround.models.inference import Ensemble, ExpertOutput
from oneround.seeds import generator
from oneround.simulate import run
from oneround.site import Site
from oracle import Federation


def test_all_rules_in_one_pass_are_each_rule_alone(federation: Federation, digits: Dataset) -> None:
    _, broadcast, uploads = federation
    chosen = {kind: rules.parse(kind) for kind in NETWORK_RULES}
    together, alone, *_ = score_uploads(chosen, uploads, broadcast, digits.test, Site("server"))
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


# --- transductive scores ---------------------------------------------------------------------------------------------


def by_hand(model: GlobalModel, images: Images, batch: int) -> Score:
    """Scores of a model in training mode, whose batch norm uses the batch: shuffled, a short last batch with the one before."""
    images = images.take(torch.randperm(len(images), generator=generator(0, "test batches")))
    starts = list(range(0, len(images) - batch + 1, batch)) or [0]
    answers = []
    if isinstance(model.inference, Ensemble):
        model.inference.load_experts()
    model.train()
    for start, end in zip(starts, [*starts[1:], len(images)], strict=True):
        answers.append(model(images.pixels[start:end].float() / 255).detach())
    model.eval()
    return Score.of(torch.cat(answers), images.labels, 10)


@pytest.mark.parametrize("batch", [64, 100, 400])
def test_transductive_scores_are_those_of_networks_in_training_mode(
    federation: Federation, digits: Dataset, batch: int
) -> None:
    _, broadcast, uploads = federation
    chosen = {kind: rules.parse(kind) for kind in ("iffi", "average", "typicality-gated", "split", "aligned-iffi")}
    scores = score_uploads(chosen, uploads, broadcast, digits.test, Site("server"), validation=few(digits), batch=batch)
    plain = score_uploads(chosen, uploads, broadcast, digits.test, Site("server"), validation=few(digits))
    assert scores.clients == plain.clients and scores.validation == plain.validation
    assert {name: scores.rules[name] for name in chosen} == plain.rules
    for kind, rule in chosen.items():
        score = scores.rules[f"{kind}, transductive {batch}"]
        expected = by_hand(acts.fuse(uploads, broadcast, rule=rule), digits.test, batch)
        assert score.confusion == expected.confusion and score.confusion != scores.rules[kind].confusion
        alone = score_model(acts.fuse(uploads, broadcast, rule=rule), digits.test, torch.device("cpu"), batch)
        assert alone.confusion == expected.confusion
    assert [sum(row) for row in score.confusion] == digits.test.labels.bincount().tolist()


def test_the_default_size_of_a_batch_is_not_in_the_name() -> None:
    assert [transductive_name("iffi", batch) for batch in (256, 64)] == ["iffi, transductive", "iffi, transductive 64"]
    assert is_transductive(transductive_name("iffi", 64)) and not is_transductive("iffi")


@pytest.mark.parametrize(
    ("images", "batch", "sizes"),
    [
        (600, 256, [256, 344]),
        (512, 256, [256, 256]),
        (100, 256, [100]),
        (257, 256, [257]),
    ],
)
def test_a_short_last_batch_joins_the_one_before(images: int, batch: int, sizes: list[int]) -> None:
    assert batch_sizes(images, batch) == sizes


def test_images_of_one_class_are_warned_about(
    federation: Federation, digits: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    _, broadcast, uploads = federation
    model = acts.fuse(uploads, broadcast, rule=rules.parse("average"))
    score_model(model, digits.test, torch.device("cpu"), 32)
    assert not caplog.records
    threes = digits.test.take(torch.nonzero(digits.test.labels == 3)[:, 0])
    score_model(model, threes, torch.device("cpu"), 32)
    assert (
        "all 35 test images are of one class" in caplog.text
        or f"all {len(threes)} test images are of one class" in caplog.text
    )


def test_ridge_and_routed_are_scored_transductively_where_networks_take_part(digits: Dataset, tmp_path: Path) -> None:
    changes = {
        "model.encoder": {"kind": "cnn", "width": 4}, "training.epochs": 1, "training.batch_size": 64, "partition.clients": 3,
        "sums.features": {"kind": "patches", "size": 48, "patch": 4}, "evaluation.batch_norm": "batch", "local.workers": 1,
        "fusion": ["routed", "ridge", "iffi"],
    }  # fmt: skip
    result = run(load("routed", changes.items()), tmp_path, data=digits)
    assert set(result.rules) == {"routed", "ridge", "iffi", "routed, transductive", "iffi, transductive"}
    assert set(result.curves) == set(result.rules), "the log has both"
    assert not any(map(is_transductive, result.personalised)) and "iffi" in result.personalised
    model = GlobalModel.load(tmp_path / "model")
    assert score_model(model, digits.test, torch.device("cpu")).accuracy == result.rules["routed"]
    transductive = score_model(model, digits.test, torch.device("cpu"), 256)
    assert transductive.accuracy == result.rules["routed, transductive"]
    assert transductive.confusion == by_hand(model, digits.test, 256).confusion, "each image with its own ridge scores"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.encoder": {"kind": "cnn", "norm": "group"}}, "cnn norm=group has no batch norm; set running"),
        ({"evaluation.batch_size": 31}, "evaluation.batch_size = 31: must be ≥ 32"),
        ({}, "20 test images; statistics of a test batch need at least 32, set running"),
    ],
)
def test_what_has_no_transductive_score_is_refused_before_anything_trains(
    digits: Dataset, changes: dict[str, Any], message: str
) -> None:
    short = replace(digits, test=digits.test.take(torch.arange(20)))
    with pytest.raises(OneroundError, match=message):
        acts.resolve(load("fafi", {"evaluation.batch_norm": "batch", **changes}.items()), short)


def test_sums_alone_have_no_transductive_score(digits: Dataset) -> None:
    with pytest.raises(RecipeError, match="no network is trained, so there is no batch norm; set running"):
        acts.resolve(load("ridge", [("evaluation.batch_norm", "batch")]), digits)
