"""The one server loop: the same result whichever transport brings the uploads in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import small_recipe
from inprocess import InProcess
from oneround.analysis.diagnosis.diagnose import LiveDiagnosis
from oneround.analysis.diagnosis.rules import Finding
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.federate.exchange import Pace
from oneround.federate.server_app import serve
from oneround.global_model import GlobalModel
from oneround.runs.log import MetricsLog
from oneround.simulate import run

NOW = Pace(0.0, 0.0, 0.0)
NOT_COMPARED = ("bytes_down", "bytes_up", "traffic")  # a federation counts what travels, a simulation the tensors in it


def both(recipe: Recipe, data: Dataset, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """`result.json` of the same recipe through the simulator and through Flower."""
    run(recipe, folder / "simulated", data=data)
    sites = range(recipe.partition.clients or 0)
    grid = InProcess({node: {"partition-id": node, "num-partitions": len(sites)} for node in sites})
    serve(grid, recipe, folder / "federated", NOW)
    simulated, federated = (
        json.loads((folder / name / "result.json").read_text()) for name in ("simulated", "federated")
    )
    return simulated, federated


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"fusion": ["typicality-gated", "iffi", "average"], "validation": 0.2, "public": 0.3, "training__epochs": 2},
        {"preset": "fedavg", "rounds": 3, "validation": 0.5, "public": 0.3},
        {"preset": "ridge", "sums__features": {"kind": "patches", "size": 96, "patch": 4}},
    ],
    ids=["one round", "three rounds", "sums"],
)
def test_a_simulation_and_a_federation_write_the_same_result(
    changes: dict[str, Any], digits: Dataset, tmp_path: Path
) -> None:
    recipe = small_recipe(**changes, partition__clients=3, partition__alpha=0.3, local__workers=1, snapshots=0)
    simulated, federated = both(recipe, digits, tmp_path)
    assert simulated.keys() == federated.keys()
    assert {key: value for key, value in simulated.items() if key not in NOT_COMPARED} == {
        key: value for key, value in federated.items() if key not in NOT_COMPARED
    }
    assert simulated["traffic"].keys() == federated["traffic"].keys()
    logs = [_numbers(tmp_path / name) for name in ("simulated", "federated")]
    assert logs[0] == logs[1] and logs[0]
    for name in (
        "model",
        *(f"rounds/round_{number:03d}" for number in range(1, recipe.rounds + 1) if recipe.rounds > 1),
    ):
        models = [
            GlobalModel.load(tmp_path / way / name).predict(digits.test.pixels) for way in ("simulated", "federated")
        ]
        assert models[0].equal(models[1]), name


def _numbers(folder: Path) -> list[dict[str, Any]]:
    """The log without times."""
    times = ("seconds", "elapsed")
    return [
        {key: value for key, value in event.items() if key not in times}
        for event in MetricsLog(folder / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_with_several_rounds_the_model_is_the_best_on_validation_images(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(
        "fedavg",
        rounds=4,
        validation=0.5,
        public=0.3,
        partition__clients=3,
        local__workers=1,
        training__learning_rate=0.3,
    )
    result = run(recipe, tmp_path / "run", data=digits)
    (rule,) = [name for name in result.chosen if name == recipe.fusion[0].label]
    epoch = result.chosen[rule]
    number = epoch // recipe.training.epochs
    best, kept = (GlobalModel.load(tmp_path / "run" / name) for name in ("model", f"rounds/round_{number:03d}"))
    assert best.predict(digits.test.pixels).equal(kept.predict(digits.test.pixels))
    written = (tmp_path / "run" / "result.json").read_bytes()
    assert json.loads(written)["model"] == {"rule": rule, "epoch": epoch, "chosen_on": "validation"}
    assert epoch != recipe.epochs
    shutil.rmtree(tmp_path / "run" / "model")
    run(recipe, tmp_path / "run", data=digits, resume=True)
    assert (tmp_path / "run" / "result.json").read_bytes() == written
    again = GlobalModel.load(tmp_path / "run" / "model")
    assert again.predict(digits.test.pixels).equal(kept.predict(digits.test.pixels))


@pytest.mark.slow
def test_a_client_that_stops_early_ends_a_simulation_and_is_remarked_in_a_federation(
    digits: Dataset, tmp_path: Path
) -> None:
    """A federation cannot take back what the other sites have trained, so it fuses all uploads."""
    stop = {"largest_weight": 0.2, "on_explosion": "stop"}
    recipe = small_recipe(
        "etf", training__epochs=3, partition__clients=2, partition__alpha=5.0, local__workers=1, safeguards=stop
    )
    with pytest.raises(RunError, match=r"client_000, epoch 1, λ = 5: .* stopped"):
        run(recipe, tmp_path / "simulated", data=digits)
    grid = InProcess({node: {"partition-id": node, "num-partitions": 2} for node in range(2)})
    serve(grid, recipe, tmp_path / "federated", NOW)
    remarks = json.loads((tmp_path / "federated" / "result.json").read_text())["remarks"]
    expected = f"client_000 stopped after epoch 1 of {recipe.epochs}: client_000, epoch 1, λ = 5"
    assert sum(remark.startswith(expected) for remark in remarks) == 1 and len(remarks) == 2


def test_loggers_of_the_recipe_hear_of_a_federation(digits: Dataset, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = small_recipe(
        partition__clients=2, partition__kind="iid", local__sinks=["tensorboard"], snapshots=0, fusion=["iffi"]
    )
    serve(InProcess({node: {"partition-id": node, "num-partitions": 2} for node in range(2)}), recipe, tmp_path, NOW)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"accuracy/iffi", "client_000/loss", "client_001/accuracy_alone"} <= set(board.Tags()["scalars"])
    accuracy = json.loads((tmp_path / "result.json").read_text())["rules"]["iffi"]["accuracy"]
    assert [event.value for event in board.Scalars("accuracy/iffi")] == pytest.approx([accuracy])


@pytest.mark.slow
def test_a_federation_is_diagnosed_while_uploads_come_in(digits: Dataset, tmp_path: Path) -> None:
    """The server finds in the uploads' histories what a simulation finds while it trains, and logs it."""
    recipe = small_recipe(
        "etf", partition__clients=2, partition__kind="iid", safeguards={"largest_weight": 0.2}, snapshots=0,
        fusion=["iffi"], local__workers=1,
    )  # fmt: skip
    findings: list[Finding] = []
    run(recipe, tmp_path / "run", data=digits, emit=LiveDiagnosis(tmp_path / "run", findings.append))
    severe = [finding.summary for finding in findings if finding.severity != "note"]
    assert any("largest_weight = 0.2" in summary for summary in severe)
    grid = InProcess({node: {"partition-id": node, "num-partitions": 2} for node in range(2)})
    serve(grid, recipe, tmp_path / "federated", NOW)
    log = (tmp_path / "federated" / "run.log").read_text()
    assert all(f"WARNING {summary}" in log for summary in severe), severe
