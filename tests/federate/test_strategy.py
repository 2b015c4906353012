"""The fusion alone, in a Flower app that is not ours: the example, run on a grid without processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord

from inprocess import InProcess
from oneround.errors import RecipeError
from oneround.federate.strategy import MergeNet
from oneround.mergenet import Merger

EXAMPLE = Path(__file__).parents[2] / "examples" / "mergenet_strategy.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mergenet_strategy", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def federate(example: ModuleType, rounds: int = 4, **options: Any) -> tuple[MergeNet, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    teacher = example.train_on(example.network(128), slice(1500, 1797)).state_dict()
    strategy = MergeNet(teacher, [("0.weight", "0.weight")], fraction_evaluate=0.0, **options)
    grid = InProcess({number: {"partition-id": number} for number in range(3)}, answer=example.client)
    start = example.network(16).state_dict()
    return strategy, strategy.start(grid, ArrayRecord(start), num_rounds=rounds).arrays.to_torch_state_dict()


@pytest.mark.slow
def test_the_example_fuses_and_its_adapter_learns(example: ModuleType) -> None:
    strategy, arrays = federate(example)
    assert [metrics["round"] for metrics in strategy.trace] == [2, 3, 4]
    assert [metrics.get("accepted") for metrics in strategy.trace] == [True, True, None]  # the result is the average
    assert all(metrics["adapter_moved"] > 0 for metrics in strategy.trace[1:])
    assert all(metrics["changed"] > metrics["by_teacher"] > 0 for metrics in strategy.trace[:2])
    net = example.network(16)
    net.load_state_dict(arrays)
    assert all(torch.isfinite(value).all() for value in arrays.values())
    lines = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(lines) < 40


@pytest.mark.parametrize(("fused", "sent"), [(0.49, True), (0.47, False)])
def test_a_fused_network_may_be_worse_by_the_margin(example: ModuleType, fused: float, sent: bool) -> None:
    judged = iter([fused, 0.5])
    strategy, _ = federate(example, rounds=3, judge=lambda _: next(judged), accept_if=0.02)
    assert strategy.trace[0]["accepted"] is sent


@pytest.mark.slow
def test_a_fused_network_that_is_judged_worse_is_not_sent(
    example: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def judge(arrays: dict[str, torch.Tensor]) -> float:
        net = example.network(16)
        net.load_state_dict(arrays)
        return float((net.eval()(example.images[1500:]).argmax(1) == example.labels[1500:]).float().mean())

    strategy, arrays = federate(example, rounds=3, judge=judge, accept_if=-1.0)  # must be better by all there is
    with caplog.at_level("WARNING", logger="oneround"):
        plain, averaged = federate(example, rounds=3, start_round=9)
    assert "start_round = 9 of 3 rounds" in caplog.text and strategy.trace[0]["reason"].startswith("judged 0.")
    assert not strategy.trace[0]["accepted"] and plain.trace == []
    assert all(torch.allclose(arrays[name], value, atol=1e-6) for name, value in averaged.items())


@pytest.mark.slow
def test_what_is_not_finite_is_not_sent(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Merger._outputs
    monkeypatch.setattr(
        Merger, "_outputs", lambda *given: {name: value * float("nan") for name, value in plain(*given).items()}
    )
    strategy, arrays = federate(example, rounds=3)
    assert not any(metrics.get("accepted") for metrics in strategy.trace)
    assert strategy.trace[0]["reason"].startswith("not finite") and "changed" not in strategy.trace[0]
    assert all(torch.isfinite(value).all() for value in arrays.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every = 0"),
        ({"start_round": 1.5}, "start_round = 1.5"),
        ({"pairs": ["0.weight"]}, "pairs: '0.weight' must be"),
        ({"accept_if": 0.5}, "accept_if = 0.5: needs judge"),
        ({"accept_if": float("nan"), "judge": lambda _: 1.0}, "accept_if = nan: must be a number"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MergeNet({}, **{"pairs": [("a", "b")], **options})


def test_a_pair_that_is_not_there_is_named_before_anybody_trains(example: ModuleType) -> None:
    strategy = MergeNet(example.network(128).state_dict(), [("9.weight", "0.weight")])
    grid = InProcess({0: {"partition-id": 0}}, answer=example.client)
    with pytest.raises(RecipeError, match=r"the student has no matrix 9.weight; it has 0.weight"):
        strategy.start(grid, ArrayRecord(example.network(16).state_dict()), num_rounds=3)
    assert grid.sent == []
