"""The server's large network: from a file or trained, fixed or learning on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from oneround import acts
from oneround.data import Dataset
from oneround.errors import ProtocolError, RecipeError, RunError
from oneround.fusion import rules
from oneround.mergenet.teacher import Teacher, layout_of, network_of, teacher_recipe
from oneround.models.encoders import encoders
from oneround.models.prototype import initialise
from oneround.protocol import Broadcast
from oneround.simulate import run
from teacher_runs import (
    TEACHER,
    federated,
    fusions,
    nothing_trained,
    short_of_memory,
)


def test_a_teacher_from_a_file(digits: Dataset, tmp_path: Path) -> None:
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
    given = initialise(encoders.parse(TEACHER["encoder"]), 1, 10, seed=9, head="linear").weights()
    head = given.pop("prototypes")
    safetensors.torch.save_file(given | ({"prototypes": head.to(keep)} if keep else {}), tmp_path / "bad.safetensors")
    more = {"teacher": {**TEACHER, "from_file": True}, "start_round": 1}
    here = {"local__teacher_weights": str(tmp_path / "bad.safetensors")}
    with pytest.raises(ProtocolError, match=text):
        run(federated(rounds=2, more=more, **here), tmp_path / "run", data=digits)
    assert nothing_trained(tmp_path / "run")


@pytest.mark.parametrize("control", ["zero", "random"])
def test_a_control_stands_in_for_the_teacher_and_knows_nothing(digits: Dataset, tmp_path: Path, control: str) -> None:
    plain = federated(more={"teacher": {**TEACHER, "epochs": 20}})
    stand_in = federated(more={"teacher": {**TEACHER, "epochs": 20, "control": control}})
    run(plain, tmp_path / "teacher", data=digits)
    run(stand_in, tmp_path / "control", data=digits)
    known, blank = (
        [event for event in fusions(tmp_path / name) if event.get("accepted")] for name in ("teacher", "control")
    )
    assert (
        min(event["teacher_validation"] for event in known)
        > 0.5
        > 0.3
        > max(event["teacher_validation"] for event in blank)
    )
    assert all((event["by_teacher"] == 0) == (control == "zero") for event in blank) and known[0]["by_teacher"] > 0
    weights = safetensors.torch.load_file(next((tmp_path / "control" / "server").rglob("teacher.safetensors")))
    begun = network_of(
        Teacher.model_validate(TEACHER), Broadcast.read(tmp_path / "control" / "broadcast.safetensors")
    ).weights()
    for name, value in weights.items():
        assert torch.equal(value, begun[name]) if control == "random" or value.dim() < 2 else not value.any()
    assert not any("public images" in line for line in (tmp_path / "control" / "run.log").read_text().splitlines())


def test_a_control_takes_no_file_and_no_lessons() -> None:
    for other in ("from_file", "learns_on"):
        with pytest.raises(RecipeError, match=f"control = zero: stands in .*; leave {other} out, or control"):
            federated(more={"teacher": {**TEACHER, other: True, "control": "zero"}})
    assert federated().digest == federated(more={"teacher": {**TEACHER, "control": "none"}}).digest
    assert federated().digest != federated(more={"teacher": {**TEACHER, "control": "zero"}}).digest
    assert not rules.of(federated(more={"teacher": {**TEACHER, "control": "zero"}}).fusion[0]).needs.public


@pytest.mark.parametrize(("rounds", "fused"), [(5, [3]), (6, [3, 5])])  # nothing is fused after the last round
def test_a_teacher_that_learns_on_has_a_lesson_before_every_fusion_and_no_other(
    digits: Dataset, tmp_path: Path, rounds: int, fused: list[int]
) -> None:
    more = {"teacher": {**TEACHER, "learns_on": True}, "start_round": 3, "every": 2}
    run(federated(rounds=rounds, more=more), tmp_path, data=digits)
    lessons = [line for line in (tmp_path / "run.log").read_text().splitlines() if "teacher/" in line]
    assert all(f"teacher/{number + 1}" in line for number, line in enumerate(lessons)) and len(lessons) == len(fused)
    assert [event["round"] for event in fusions(tmp_path) if "accepted" in event] == fused


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


def test_its_layout_is_known_without_its_numbers(digits: Dataset) -> None:
    broadcast = acts.prepare(acts.resolve(federated(), digits), digits.class_names, digits.shape)
    options = Teacher.model_validate(TEACHER)
    layout, net = layout_of(options, broadcast), network_of(options, broadcast).state_dict()
    assert {name: value.shape for name, value in layout.items()} == {name: value.shape for name, value in net.items()}
    assert all(value.is_meta for value in layout.values()) and net["bias"].shape == (10,)
    again = network_of(options, broadcast).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in net.items()), "the seed of the recipe decides"


@pytest.mark.parametrize(("epochs", "schedule"), [(1, "constant"), (3, "cosine")])
def test_it_learns_by_cross_entropy_on_its_own_network(epochs: int, schedule: str) -> None:
    options = Teacher.model_validate({**TEACHER, "learning_rate": 0.02})
    recipe = teacher_recipe(federated().federated, options, epochs, 16)
    assert list(recipe.objective.terms) == ["cross-entropy"] and recipe.model.head == "linear"
    assert recipe.encoder.dump() == options.encoder.dump()
    training = recipe.training
    assert (training.epochs, training.batch_size, training.learning_rate, training.schedule) == (
        epochs,
        16,
        0.02,
        schedule,
    )
