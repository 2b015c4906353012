"""MergeNet between rounds: on one machine, over Flower, stopped and resumed, and when it does not help."""

from __future__ import annotations

import html
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import bad
from conftest import run_in_parts, small_recipe
from inprocess import InProcess
from oneround import acts
from oneround.data import Dataset
from oneround.errors import RecipeError, RunError
from oneround.federate.server_app import Pace, serve
from oneround.fusion import mergenet as merged
from oneround.fusion import rules
from oneround.global_model import GlobalModel
from oneround.protocol import Broadcast
from oneround.report import report
from oneround.runs.result import Result
from oneround.simulate import run
from teacher_runs import (
    ADAPTER,
    SHORT,
    TEACHER,
    contents,
    federated,
    fusions,
    nothing_trained,
    same,
    scale_outputs,
    weights_of,
)


def test_the_adapter_fuses_learns_and_reports(digits: Dataset, tmp_path: Path) -> None:
    result = run(federated(), tmp_path, data=digits)
    by_round = {event["round"]: event for event in fusions(tmp_path)}
    assert (
        "accepted" not in by_round[1]
        and all(by_round[number]["accepted"] for number in (2, 3))
        and "accepted" not in by_round[4]
    )
    assert (
        all(by_round[number]["changed"] > by_round[number]["by_teacher"] > 0 for number in (2, 3))
        and "changed" not in by_round[4]
    )
    assert all(by_round[number]["adapter_moved"] > 0 for number in (3, 4))  # the first lesson is after the first fusion
    name = "mergenet teacher.encoder=cnn width=8 teacher.epochs=2 adapter.width=8 adapter.heads=2 adapter.layers=1"
    ours, plain = result.curves[name], result.curves["average"]
    assert ours[1] == plain[1] and ours[4] == plain[4] and ours[2] != plain[2]


def test_the_report_has_round_by_round_what_is_sent_and_why(digits: Dataset, tmp_path: Path) -> None:
    run(federated(more={"accept_if": 0.0}), tmp_path / "run", data=digits)
    events = {event["round"]: event for event in fusions(tmp_path / "run")}
    page = html.unescape(report([tmp_path / "run"]))
    between = page.partition('id="rounds"')[2].partition("<section")[0]
    for number, event in events.items():
        assert (f'<td class="words">{event["reason"]}</td>' if event.get("reason") else f">{number}</th>") in between
        if "error" in event:
            assert f"{event['error']:.4g}" in between
        if "by_teacher" in event:
            assert f"{event['changed']:.4g}" in between and f"{event['by_teacher']:.4g}" in between
    assert "1 in each of 4 rounds" in page and "4 rounds, 3 clients" in page
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert f"{round(result['bytes_up'] / 4):,}" in page.partition('id="traffic"')[2]


def test_switched_off_it_is_plain_averaging(digits: Dataset, tmp_path: Path) -> None:
    run(federated(more={"every": 0}, rounds=3), tmp_path / "off", data=digits)
    run(federated("average", rounds=3), tmp_path / "plain", data=digits)
    off, plain = (GlobalModel.load(tmp_path / name / "model").inference.state_dict() for name in ("off", "plain"))
    assert all(torch.equal(off[name], value) for name, value in plain.items())
    assert not (tmp_path / "off" / "server").exists()


def test_the_same_through_a_simulation_and_flower(digits: Dataset, tmp_path: Path) -> None:
    recipe = federated(participation__fraction=0.6)
    run(recipe, tmp_path / "simulated", data=digits)
    nodes = {10 + k: {"partition-id": k, "num-partitions": 3} for k in range(3)}
    serve(InProcess(nodes), recipe, tmp_path / "carried", Pace(poll=0.01, patience=0.0, farewell=0.0))
    assert contents(tmp_path / "simulated") == contents(tmp_path / "carried")
    simulated, carried = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("simulated", "carried")
    )
    assert simulated["rules"] == carried["rules"]
    assert fusions(tmp_path / "simulated") == fusions(tmp_path / "carried")


def test_a_server_started_again_between_rounds_goes_on(digits: Dataset, tmp_path: Path) -> None:
    recipe = federated(rounds=3)
    run(recipe, tmp_path / "whole", data=digits)
    nodes = {10 + k: {"partition-id": k, "num-partitions": 3} for k in range(3)}
    pace = Pace(poll=0.01, patience=0.0, farewell=0.0)

    class Dies(InProcess):
        def push_messages(self, messages: Any) -> Any:
            if len(self.sent) >= 5:  # two rounds are not over yet
                raise KeyboardInterrupt
            return super().push_messages(messages)

    with pytest.raises(KeyboardInterrupt):
        serve(Dies(nodes), recipe, tmp_path / "carried", pace)
    serve(InProcess(nodes), recipe, tmp_path / "carried", pace)
    assert contents(tmp_path / "whole") == contents(tmp_path / "carried")
    result = json.loads((tmp_path / "carried" / "result.json").read_text())
    rounds = json.loads((tmp_path / "carried" / "traffic.json").read_text())
    assert list(rounds) == ["1", "2", "3"]
    assert result["bytes_up"] == sum(up for each in rounds.values() for _, up in each.values())


def test_stopped_and_resumed_it_ends_the_same(digits: Dataset, tmp_path: Path) -> None:
    recipe = federated(local__checkpoint_seconds=0.0, rounds=3, more={"teacher": {**TEACHER, "learns_on": True}})
    run(recipe, tmp_path / "whole", data=digits)
    assert run_in_parts(recipe, tmp_path / "parts", digits) >= 3 and contents(tmp_path / "whole") == contents(
        tmp_path / "parts"
    )
    assert fusions(tmp_path / "whole") == fusions(tmp_path / "parts")


def test_what_is_not_finite_is_never_sent(digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_outputs(monkeypatch, torch.nan)
    run(federated(rounds=3), tmp_path / "broken", data=digits)
    run(federated("average", rounds=3), tmp_path / "plain", data=digits)
    second = next(event for event in fusions(tmp_path / "broken") if event["round"] == 2)
    assert not second["accepted"] and second["reason"].startswith(
        "not finite; is adapter.learning_rate = 0.001 too large?"
    )
    assert "NaN" not in (tmp_path / "broken" / "metrics.jsonl").read_text()
    assert same(*(weights_of(tmp_path / name) for name in ("broken", "plain")))


def test_a_fused_network_that_is_worse_by_too_much_is_not_sent(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_outputs(monkeypatch, 0.0)
    run(federated(rounds=3, more={"accept_if": 0.02, "start_round": 2}), tmp_path / "careful", data=digits)
    run(federated(rounds=3), tmp_path / "bold", data=digits)
    careful, bold = (
        next(event for event in fusions(tmp_path / name) if event["round"] == 2) for name in ("careful", "bold")
    )
    assert careful["fused_validation"] < careful["average_validation"] - 0.02
    assert not careful["accepted"] and bold["accepted"]
    assert "the fused network is not sent" in (tmp_path / "careful" / "run.log").read_text()
    run(federated("average", rounds=3), tmp_path / "plain", data=digits)
    models = [weights_of(tmp_path / name) for name in ("careful", "plain", "bold")]
    assert same(models[0], models[1]) and not same(models[0], models[2])


@pytest.mark.parametrize(("fused", "sent"), [(0.49, True), (0.47, False), (0.6, True)])
def test_a_fused_network_is_sent_unless_it_is_worse_by_more_than_the_margin(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: float, sent: bool
) -> None:
    judged = iter([fused, 0.5, 0.9])  # the fused network, the average, the teacher
    monkeypatch.setattr(merged, "accuracy", lambda *_: next(judged))
    run(federated(rounds=3, more={"accept_if": 0.02}), tmp_path, data=digits)
    event = next(event for event in fusions(tmp_path) if event["round"] == 2)
    assert event["accepted"] is sent and ("reason" not in event) is sent


def test_rules_with_other_options_keep_apart(digits: Dataset, tmp_path: Path) -> None:
    one = {"kind": "mergenet", "teacher": TEACHER, "adapter": ADAPTER}
    two = {**one, "adapter": {**ADAPTER, "width": 4}}
    other = {"kind": "taught", "teacher": {**TEACHER, "encoder": {"kind": "cnn", "width": 4}}}
    run(federated(rounds=3, fusion=[one, "average"]), tmp_path / "alone", data=digits)
    run(federated(rounds=3, fusion=[one, two, other, "average"]), tmp_path / "beside", data=digits)
    alone, beside = (GlobalModel.load(tmp_path / name / "model").inference.state_dict() for name in ("alone", "beside"))
    assert all(torch.equal(beside[name], value) for name, value in alone.items())
    events = [event for event in fusions(tmp_path / "beside") if event["round"] == 2 and "accepted" in event]
    assert [event["accepted"] for event in events] == [True, False]
    assert events[1]["reason"].startswith("only scored: mergenet teacher.encoder=cnn")
    assert "is only scored: mergenet teacher.encoder=cnn" in Result.read(tmp_path / "beside").remarks[0]


def test_a_lost_adapter_is_an_error_until_the_rounds_begin_again(digits: Dataset, tmp_path: Path) -> None:
    recipe = federated(local__checkpoint_seconds=0.0)
    run(recipe, tmp_path / "whole", data=digits)
    shutil.copytree(tmp_path / "whole", tmp_path / "lost")
    (tmp_path / "lost" / "result.json").unlink()
    for path in (tmp_path / "lost" / "server").rglob("adapter_*"):
        path.unlink()
    with pytest.raises(RunError, match=r"it cannot be made again: remove broadcast.safetensors"):
        run(recipe, tmp_path / "lost", data=digits, resume=True)
    (tmp_path / "lost" / "broadcast.safetensors").unlink()
    run(recipe, tmp_path / "lost", data=digits, resume=True)
    assert contents(tmp_path / "lost") == contents(tmp_path / "whole")


def test_what_acts_between_rounds_is_not_fused_afterwards(digits: Dataset, tmp_path: Path) -> None:
    run(federated(rounds=2, more={"start_round": 1}), tmp_path, data=digits)
    broadcast = Broadcast.read(tmp_path / "broadcast.safetensors")
    lacks = {
        kind: acts.missing_inputs(rules.parse(kind), broadcast) for kind in ("mergenet", "taught", "iffi", "average")
    }
    assert lacks["mergenet"] == lacks["taught"] == ["what the server keeps between rounds"]
    assert lacks["iffi"] == ["prototypes: model.head is linear"] and lacks["average"] == []
    assert "mergenet: it acts between rounds and cannot be applied afterwards" in bad(
        "fuse", str(tmp_path), "--rule", "mergenet"
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"public": 0.0, "validation": 0.0}, "mergenet needs public images"),
        ({"more": {"accept_if": 0.1}, "validation": 0.0}, "mergenet chooses on images the server holds back"),
        ({"more": {"accept_if": -0.1}}, "accept_if"),
        ({"more": {"adapter": {"learning_rate": 1e7}}}, "learning_rate"),
        ({"more": {"accept_if": 2.0}}, r"accept_if = 2.0: must be ≤ 1"),
        ({"more": {"adapter": {"heads": 0}}}, "heads"),
        (
            {"rounds": 2},
            r"rounds = 2: fusion rule mergenet begins in round 2 .start_round. .* set rounds above 2, or every: 0",
        ),
        ({"rounds": 1}, r"rounds = 1: fusion rule mergenet begins in round 2"),
        ({"companion": "mergenet"}, "a companion starts over in every round"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        federated(**changes)


def test_an_unknown_pair_is_named(digits: Dataset, tmp_path: Path) -> None:
    pairs = [{"student": "encoder.convolutions.7.weight", "teacher": "prototypes"}]
    with pytest.raises(RecipeError, match=r"the student has no matrix encoder.convolutions.7.weight; it has"):
        run(federated(rounds=3, more={"pairs": pairs}), tmp_path / "federated", data=digits)
    companion = {"kind": "mergenet", "teacher": {"encoder": "cnn"}, "pairs": pairs}
    usual = {"public": 0.3, "validation": 0.2, "companion": companion, **SHORT}
    with pytest.raises(RecipeError, match=r"the student has no matrix encoder.convolutions.7.weight; it has"):
        run(small_recipe("mergenet-single", **usual), tmp_path / "single", data=digits)
    assert nothing_trained(tmp_path / "federated") and nothing_trained(tmp_path / "single")
