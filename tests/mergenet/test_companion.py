"""Student and teacher side by side on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import run_in_parts, small_recipe
from oneround.data import Dataset
from oneround.errors import RecipeError, RunError
from oneround.runs.log import MetricsLog
from oneround.simulate import run
from teacher_runs import (
    ADAPTER,
    SHORT,
    TEACHER,
    same,
    scale_outputs,
    short_of_memory,
    weights_of,
)


def test_a_companion_that_never_acts_is_logged(digits: Dataset, tmp_path: Path) -> None:
    companion = {"kind": "mergenet", "teacher": {"encoder": TEACHER["encoder"]}, "every": 10_000}
    usual = {"public": 0.3, "validation": 0.2, "companion": companion, **SHORT}
    run(small_recipe("mergenet-single", **usual), tmp_path, data=digits)
    assert "client_000: companion.every = 10000: its training has" in (tmp_path / "run.log").read_text()


def test_a_companion_is_trained_beside_the_student_and_nowhere_else() -> None:
    for name, value in (("from_file", True), ("epochs", 3), ("batch_size", 32), ("learns_on", True)):
        with pytest.raises(RecipeError, match=rf"companion.*teacher.{name}"):
            small_recipe("mergenet-single", companion={"kind": "mergenet", "teacher": {name: value}})


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


@pytest.mark.slow
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


def test_what_is_not_finite_is_left_out_and_logged_once(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_outputs(monkeypatch, torch.nan)
    companion = {"kind": "mergenet", "teacher": {"encoder": TEACHER["encoder"]}, "adapter": ADAPTER, "every": 5}
    usual = {"public": 0.3, "validation": 0.2, "training__epochs": 2, **SHORT}
    run(small_recipe("mergenet-single", **usual, companion=companion), tmp_path / "broken", data=digits)
    run(small_recipe("mergenet-single", **usual, companion=None), tmp_path / "alone", data=digits)
    assert same(*(weights_of(tmp_path / name) for name in ("broken", "alone")))
    assert "NaN" not in (tmp_path / "broken" / "metrics.jsonl").read_text()
    assert (tmp_path / "broken" / "run.log").read_text().count("is not finite and is not used") == 1
