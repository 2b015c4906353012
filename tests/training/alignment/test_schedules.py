"""Schedules run over the whole training; consensus follows the spread of the clients."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients import SMALL
from oneround.config.load import load
from oneround.data import Dataset
from oneround.runs.log import MetricsLog
from oneround.simulate import run
from oneround.training.alignment.schedules import consensus, schedules, spread


def test_schedules_over_the_whole_training() -> None:
    along = [0.0, 0.25, 0.5, 1.0]
    assert [schedules.parse("constant").factor(p, 0.3) for p in along] == [1, 1, 1, 1]
    assert [schedules.parse("linear").factor(p, 0.3) for p in along] == [1, 0.75, 0.5, 0]
    cosine = [schedules.parse("cosine").factor(p, 0.3) for p in along]
    assert np.allclose(cosine, [1, (1 + math.sqrt(0.5)) / 2, 0.5, 0])
    assert [schedules.parse("consensus").factor(p, 0.3) for p in along] == [0.3] * 4


def test_consensus_is_the_spread_over_the_first_spread() -> None:
    apart = [torch.tensor([[0.0, 2.0]]), torch.tensor([[4.0, 2.0]])]
    assert spread(apart) == 1.0  # standard deviations 2 and 0
    spreads = {1: 0.5, 2: 0.4, 3: 0.8}
    assert [consensus(spreads, done) for done in range(4)] == [1, 1, 0.8, 1]


@pytest.mark.slow
def test_consensus_follows_the_spread_of_the_clients_and_survives_a_stop(digits: Dataset, tmp_path: Path) -> None:
    alignment = {"alignment.schedule": "consensus", "alignment.weight.value": 100.0}
    training = {"training.clip_norm": 0.0, "training.epochs": 4, "snapshots": 0, "local.workers": 1}
    partition = {"partition.clients": 3, "partition.alpha": 0.5}
    recipe = load("etf", SMALL | alignment | training | partition)
    result = run(recipe, tmp_path / "whole", data=digits)
    assert any("simulation only" in remark for remark in result.remarks)
    spreads = read_json(tmp_path / "whole" / "consensus.json")
    expected = [1.0, *(min(1.0, spreads[str(epoch)] / spreads["1"]) for epoch in (1, 2, 3))]
    factors = [
        event["s"]
        for event in events(tmp_path / "whole")
        if event["event"] == "epoch" and event["client"] == "client_000"
    ]
    assert factors == pytest.approx(expected) and min(factors) < 1

    class Stop(Exception):
        pass

    def stop_in_the_middle(event: dict[str, Any]) -> None:
        if event["event"] == "epoch" and event["epoch"] == 3 and event["client"] != "client_000":
            raise Stop

    with pytest.raises(Stop):
        run(recipe, tmp_path / "parted", data=digits, emit=stop_in_the_middle)
    run(recipe, tmp_path / "parted", data=digits, resume=True)
    results = [read_json(tmp_path / name / "result.json") for name in ("whole", "parted")]
    assert results[0] == results[1]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def events(folder: Path) -> list[dict[str, Any]]:
    return list(MetricsLog(folder / "metrics.jsonl"))
