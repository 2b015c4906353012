"""MergeNet in whole runs: between rounds, on one machine, over Flower, against its yardsticks."""

from __future__ import annotations

import html
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import bad
from conftest import run_in_parts, small_recipe
from oneround import acts
from oneround.data import Dataset
from oneround.errors import ProtocolError, RecipeError, RunError
from oneround.federate.server import Pace, serve
from oneround.folder import RunFolder
from oneround.fusion import merged, rules
from oneround.learning.step import Stepper
from oneround.mergenet import Merger
from oneround.models.encoders import encoders
from oneround.models.prototype import initialise
from oneround.observe.log import MetricsLog
from oneround.protocol import Broadcast, GlobalModel, blob
from oneround.recipe import Recipe
from oneround.report import report
from oneround.runs import Result
from oneround.simulate import run

sys.path.insert(0, str(Path(__file__).parent.parent / "federate"))
from inprocess import InProcess

SHORT = {"training__schedule": "constant", "training__milestones": []}
TEACHER = {"encoder": {"kind": "cnn", "width": 8}, "epochs": 2}
ADAPTER = {"width": 8, "heads": 2, "layers": 1}


def federated(kind: str = "mergenet", rounds: int = 4, more: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """Digits, three clients, narrow networks, one epoch a round."""
    preset = {"mergenet": "mergenet", "taught": "fedavg+taught", "average": "fedavg"}[kind]
    extra = {"adapter": ADAPTER} if kind == "mergenet" else {}
    rule = {"kind": kind, **({} if kind == "average" else {"teacher": TEACHER, **extra, **(more or {})})}
    usual = {
        "rounds": rounds, "partition__clients": 3, "partition__alpha": 1.0, "local__workers": 1, "public": 0.3, "validation": 0.2,
        "fusion": [rule, "average"] if kind != "average" else ["average"], **SHORT,
    }  # fmt: skip
    return small_recipe(preset, **{**usual, **changes})


def fusions(folder: Path) -> list[dict[str, Any]]:
    return [event for event in MetricsLog(folder / "metrics.jsonl") if event["event"] == "fusion"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return GlobalModel.load(folder / "model").inference.state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


def contents(folder: Path) -> list[str]:
    return [upload.content for upload in RunFolder(folder).uploads()]


def test_the_adapter_fuses_learns_and_tells(digits: Dataset, tmp_path: Path) -> None:
    result = run(federated(), tmp_path, data=digits)
    told = {event["round"]: event for event in fusions(tmp_path)}
    assert (
        "accepted" not in told[1] and all(told[number]["accepted"] for number in (2, 3)) and "accepted" not in told[4]
    )
    assert (
        all(told[number]["changed"] > told[number]["by_teacher"] > 0 for number in (2, 3)) and "changed" not in told[4]
    )
    assert all(told[number]["adapter_moved"] > 0 for number in (3, 4))  # the first lesson is after the first fusion
    ours, plain = result.curves["mergenet teacher.encoder=cnn width=8 teacher.epochs=2 adapter.width=8 adapter.heads=2 adapter.layers=1"], result.curves["average"]  # fmt: skip
    assert ours[1] == plain[1] and ours[4] == plain[4] and ours[2] != plain[2]


def test_the_report_tells_round_by_round_what_was_sent_and_why(digits: Dataset, tmp_path: Path) -> None:
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
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert f"{round(told['bytes_up'] / 4):,}" in page.partition('id="traffic"')[2]


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
    told = json.loads((tmp_path / "carried" / "result.json").read_text())
    rounds = json.loads((tmp_path / "carried" / "traffic.json").read_text())
    assert list(rounds) == ["1", "2", "3"]
    assert told["bytes_up"] == sum(up for each in rounds.values() for _, up in each.values())


def test_stopped_and_resumed_it_ends_the_same(digits: Dataset, tmp_path: Path) -> None:
    recipe = federated(local__checkpoint_seconds=0.0, rounds=3, more={"teacher": {**TEACHER, "learns_on": True}})
    run(recipe, tmp_path / "whole", data=digits)
    assert run_in_parts(recipe, tmp_path / "parts", digits) >= 3 and contents(tmp_path / "whole") == contents(
        tmp_path / "parts"
    )
    assert fusions(tmp_path / "whole") == fusions(tmp_path / "parts")


def test_what_is_not_finite_is_never_sent(digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Merger._outputs

    def broken(self: Merger, *given: Any) -> Any:
        return {name: value * float("nan") for name, value in plain(self, *given).items()}

    monkeypatch.setattr(Merger, "_outputs", broken)
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
    plain = Merger._outputs
    monkeypatch.setattr(Merger, "_outputs", lambda self, *given: {name: 0 * value for name, value in plain(self, *given).items()})  # fmt: skip
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
    judged = iter([fused, 0.5])
    monkeypatch.setattr(merged, "accuracy", lambda *_: next(judged))
    run(federated(rounds=3, more={"accept_if": 0.02}), tmp_path, data=digits)
    event = next(event for event in fusions(tmp_path) if event["round"] == 2)
    assert event["accepted"] is sent and ("reason" not in event) is sent


def test_the_average_can_be_taught_by_the_same_teacher(digits: Dataset, tmp_path: Path) -> None:
    result = run(federated("taught", rounds=2), tmp_path / "taught", data=digits)
    run(federated(rounds=2, more={"start_round": 1}), tmp_path / "fused", data=digits)
    taught, fused = (
        blob.read(next((tmp_path / name / "server").rglob("teacher.safetensors")), "teacher")[1]
        for name in ("taught", "fused")
    )
    assert all(torch.equal(fused[name], value) for name, value in taught.items())
    ours = next(curve for name, curve in result.curves.items() if name.startswith("taught"))
    assert ours[1] != result.curves["average"][1]


def test_a_teacher_from_a_file(digits: Dataset, tmp_path: Path) -> None:
    import safetensors.torch

    given = initialise(encoders.parse(TEACHER["encoder"]), 1, 10, seed=9, head="linear")
    safetensors.torch.save_file(given.weights(), tmp_path / "teacher.safetensors")
    more = {"teacher": {**TEACHER, "from_file": True}}
    with pytest.raises(RecipeError, match=r"teacher.from_file needs local.teacher_weights"):
        run(federated(rounds=2, more={**more, "start_round": 1}), tmp_path / "without", data=digits)
    here = {"local__teacher_weights": str(tmp_path / "teacher.safetensors")}
    run(federated(rounds=2, more={**more, "start_round": 1}, **here), tmp_path / "with", data=digits)
    kept = safetensors.torch.load_file(next((tmp_path / "with" / "server").rglob("teacher.safetensors")))
    assert torch.equal(kept["prototypes"], given.weights()["prototypes"])


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        (None, "tensor prototypes is missing"),
        (torch.int32, r"prototypes is torch.int32, this encoder has torch.float32"),
    ],
)
def test_a_teacher_without_its_classifier_is_refused(
    digits: Dataset, tmp_path: Path, keep: torch.dtype | None, text: str
) -> None:
    import safetensors.torch

    given = initialise(encoders.parse(TEACHER["encoder"]), 1, 10, seed=9, head="linear").weights()
    head = given.pop("prototypes")
    safetensors.torch.save_file(given | ({"prototypes": head.to(keep)} if keep else {}), tmp_path / "bad.safetensors")
    more = {"teacher": {**TEACHER, "from_file": True}, "start_round": 1}
    here = {"local__teacher_weights": str(tmp_path / "bad.safetensors")}
    with pytest.raises(ProtocolError, match=text):
        run(federated(rounds=2, more=more, **here), tmp_path / "run", data=digits)
    assert nothing_trained(tmp_path / "run")


def test_rules_with_other_options_keep_apart(digits: Dataset, tmp_path: Path) -> None:
    one = {"kind": "mergenet", "teacher": TEACHER, "adapter": ADAPTER}
    two = {**one, "adapter": {**ADAPTER, "width": 4}}
    other = {"kind": "taught", "teacher": {**TEACHER, "encoder": {"kind": "cnn", "width": 4}}}
    run(federated(rounds=3, fusion=[one, "average"]), tmp_path / "alone", data=digits)
    run(federated(rounds=3, fusion=[one, two, other, "average"]), tmp_path / "beside", data=digits)
    alone, beside = (GlobalModel.load(tmp_path / name / "model").inference.state_dict() for name in ("alone", "beside"))
    assert all(torch.equal(beside[name], value) for name, value in alone.items())
    told = [event for event in fusions(tmp_path / "beside") if event["round"] == 2 and "accepted" in event]
    assert [event["accepted"] for event in told] == [True, False]
    assert told[1]["reason"].startswith("only scored: mergenet teacher.encoder=cnn")
    assert "is only scored: mergenet teacher.encoder=cnn" in Result.read(tmp_path / "beside").remarks[0]


def test_a_lost_adapter_is_told_and_not_made_up(digits: Dataset, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("rounds", "fused"), [(5, [3]), (6, [3, 5])])  # nothing is fused after the last round
def test_a_teacher_that_learns_on_has_a_lesson_before_every_fusion_and_no_other(
    digits: Dataset, tmp_path: Path, rounds: int, fused: list[int]
) -> None:
    more = {"teacher": {**TEACHER, "learns_on": True}, "start_round": 3, "every": 2}
    run(federated(rounds=rounds, more=more), tmp_path, data=digits)
    lessons = [line for line in (tmp_path / "run.log").read_text().splitlines() if "teacher/" in line]
    assert all(f"teacher/{number + 1}" in line for number, line in enumerate(lessons)) and len(lessons) == len(fused)
    assert [event["round"] for event in fusions(tmp_path) if "accepted" in event] == fused


def test_what_acts_between_rounds_is_not_fused_afterwards(digits: Dataset, tmp_path: Path) -> None:
    run(federated(rounds=2, more={"start_round": 1}), tmp_path, data=digits)
    broadcast = Broadcast.read(tmp_path / "broadcast.safetensors")
    lacks = {kind: acts.lacking(rules.parse(kind), broadcast) for kind in ("mergenet", "taught", "iffi", "average")}
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
        ({"companion": "mergenet"}, "a companion begins anew in every round"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        federated(**changes)


def test_a_pair_that_is_not_there_is_named(digits: Dataset, tmp_path: Path) -> None:
    pairs = [{"student": "encoder.convolutions.7.weight", "teacher": "prototypes"}]
    with pytest.raises(RecipeError, match=r"the student has no matrix encoder.convolutions.7.weight; it has"):
        run(federated(rounds=3, more={"pairs": pairs}), tmp_path / "federated", data=digits)
    companion = {"kind": "mergenet", "teacher": {"encoder": "cnn"}, "pairs": pairs}
    usual = {"public": 0.3, "validation": 0.2, "companion": companion, **SHORT}
    with pytest.raises(RecipeError, match=r"the student has no matrix encoder.convolutions.7.weight; it has"):
        run(small_recipe("mergenet-single", **usual), tmp_path / "single", data=digits)
    assert nothing_trained(tmp_path / "federated") and nothing_trained(tmp_path / "single")


def test_a_companion_that_never_acts_is_told(digits: Dataset, tmp_path: Path) -> None:
    companion = {"kind": "mergenet", "teacher": {"encoder": TEACHER["encoder"]}, "every": 10_000}
    usual = {"public": 0.3, "validation": 0.2, "companion": companion, **SHORT}
    run(small_recipe("mergenet-single", **usual), tmp_path, data=digits)
    assert "client_000: companion.every = 10000, and it takes" in (tmp_path / "run.log").read_text()


def nothing_trained(folder: Path) -> bool:
    """Whether a run was refused before anybody learned anything."""
    return not any((folder / name).exists() for name in ("recipe.yaml", "uploads", "server", "metrics.jsonl"))


@pytest.mark.parametrize(
    ("more", "local", "text"),
    [
        ({}, "large.safetensors", r"local.teacher_weights = large.safetensors: the teacher is trained .* set from_file: true"),
        ({"teacher": {**TEACHER, "from_file": True}}, "large.safetensors", r"local.teacher_weights = large.safetensors: not a readable"),
    ],
)  # fmt: skip
def test_what_would_be_noticed_rounds_later_is_refused_before_the_first(
    digits: Dataset, tmp_path: Path, more: dict[str, Any], local: str, text: str
) -> None:
    with pytest.raises((RecipeError, ProtocolError), match=text):
        run(federated(more=more, local__teacher_weights=local), tmp_path / "run", data=digits)
    assert nothing_trained(tmp_path / "run")


def test_a_companion_is_trained_beside_the_student_and_nowhere_else() -> None:
    for name, value in (("from_file", True), ("epochs", 3), ("batch_size", 32), ("learns_on", True)):
        with pytest.raises(RecipeError, match=rf"companion.*teacher.{name}"):
            small_recipe("mergenet-single", companion={"kind": "mergenet", "teacher": {name: value}})


@pytest.mark.parametrize(
    ("wide", "key"),
    [(8, "fusion.0.teacher.batch_size = 48 does not fit .*; 12 would .--set fusion.0.teacher.batch_size=12"),
     (4, "client_00.: training.batch_size = 32 does not fit .*; 16 would")],
)  # fmt: skip
def test_out_of_memory_names_whose_batch_it_was(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: int, key: str
) -> None:
    """Memory for so many samples of the network that wide: the teacher's, or the clients'."""
    short_of_memory(monkeypatch, wide, 18)
    more = {"teacher": {**TEACHER, "batch_size": 48}, "start_round": 1}
    recipe = federated(rounds=2, more=more, training__batch_size=32, model__encoder={"kind": "cnn", "width": 4})
    with pytest.raises(RunError, match=key):
        run(recipe, tmp_path, data=digits)


def test_out_of_memory_beside_a_companion_names_what_both_have_room_for(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_memory(monkeypatch, 8, 9)
    usual = {
        "public": 0.3, "validation": 0.2, "companion": {"kind": "mergenet", "teacher": {"encoder": TEACHER["encoder"]}},
        "training__batch_size": 32, "model__encoder": {"kind": "cnn", "width": 4}, **SHORT,
    }  # fmt: skip
    with pytest.raises(RunError, match=r"training.batch_size = 32 does not fit .*; 8 would"):
        run(small_recipe("mergenet-single", **usual), tmp_path, data=digits)


def short_of_memory(monkeypatch: pytest.MonkeyPatch, wide: int, room: int) -> None:
    """Networks of that width have room for so many samples and no more."""
    step = Stepper._step

    def short(self: Stepper, pixels: Any, labels: Any, numbers: Any) -> None:
        if self.recipe.model.encoder.dump()["width"] == wide and len(labels) > room:  # type: ignore[union-attr]
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self, pixels, labels, numbers)

    monkeypatch.setattr(Stepper, "_step", short)


def test_on_one_machine_student_and_teacher_learn_side_by_side(digits: Dataset, tmp_path: Path) -> None:
    companion = {"kind": "mergenet", "teacher": {"encoder": TEACHER["encoder"]}, "adapter": ADAPTER, "every": 5}
    usual = {"public": 0.3, "validation": 0.2, "companion": companion, "local__checkpoint_seconds": 0.0, **SHORT}
    recipe = small_recipe("mergenet-single", **usual, training__epochs=3)
    run(recipe, tmp_path / "whole", data=digits)
    epochs = [event for event in MetricsLog(tmp_path / "whole" / "metrics.jsonl") if event["event"] == "epoch"]
    assert all(event["adapter_adapter_moved"] > 0 and event["adapter_by_teacher"] > 0 for event in epochs)
    never = small_recipe("mergenet-single", **{**usual, "companion": {**companion, "every": 10**6}}, training__epochs=3)
    alone = small_recipe("mergenet-single", **{**usual, "companion": None}, training__epochs=3)
    for name, each in (("never", never), ("alone", alone)):
        run(each, tmp_path / name, data=digits)
    whole, unfused, plain = (weights_of(tmp_path / name) for name in ("whole", "never", "alone"))
    assert same(unfused, plain) and not same(whole, plain)
    assert run_in_parts(recipe, tmp_path / "parts", digits) >= 2
    assert same(weights_of(tmp_path / "parts"), whole)


def test_on_one_machine_what_is_not_finite_is_left_out_and_said_once(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Merger._outputs
    monkeypatch.setattr(Merger, "_outputs", lambda *given: {name: value * torch.nan for name, value in plain(*given).items()})  # fmt: skip
    companion = {"kind": "mergenet", "teacher": {"encoder": TEACHER["encoder"]}, "adapter": ADAPTER, "every": 5}
    usual = {"public": 0.3, "validation": 0.2, "training__epochs": 2, **SHORT}
    run(small_recipe("mergenet-single", **usual, companion=companion), tmp_path / "broken", data=digits)
    run(small_recipe("mergenet-single", **usual, companion=None), tmp_path / "alone", data=digits)
    assert same(*(weights_of(tmp_path / name) for name in ("broken", "alone")))
    assert "NaN" not in (tmp_path / "broken" / "metrics.jsonl").read_text()
    assert (tmp_path / "broken" / "run.log").read_text().count("is not finite, the student goes on without it") == 1


@pytest.mark.parametrize(
    ("kind", "parameters", "last"), [("mobilenet-v2", 2_351_972, (100, 1280)), ("resnet50", 23_705_252, (100, 2048))]
)
def test_published_sizes_for_a_hundred_classes(kind: str, parameters: int, last: tuple[int, int]) -> None:
    net = initialise(encoders.parse(kind), 3, 100, seed=1, head="linear")
    assert sum(each.numel() for each in net.parameters()) == parameters
    assert tuple(net.prototypes.shape) == last
    if kind == "mobilenet-v2":
        assert tuple(net.state_dict()["encoder.blocks.15.layers.6.weight"].shape) == (160, 960, 1, 1)
    with torch.no_grad():
        assert net.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
