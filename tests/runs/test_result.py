"""The value that a run returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import small_recipe
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.runs.result import Result, mean_over_clients
from oneround.simulate import run


def test_what_a_run_returns_is_what_is_read_again(digits: Dataset, tmp_path: Path) -> None:
    result = run(small_recipe(training__epochs=2, snapshots=1, validation=0.1, local__workers=1), tmp_path, data=digits)
    again = Result.read(str(tmp_path))
    assert again == result and again.folder == tmp_path
    content = json.loads((tmp_path / "result.json").read_text())
    assert again.personalised == mean_over_clients(content["personalised"]) and again.partition == content["partition"]
    for rule, epoch in again.chosen.items():
        assert again.validation[rule][epoch] == max(again.validation[rule].values())
    (tmp_path / "result.json").write_text("{torn")
    with pytest.raises(RunError, match=r"result\.json: damaged"):
        Result.read(tmp_path)
    (tmp_path / "result.json").unlink()
    with pytest.raises(RunError, match=r"no finished run here .* --resume"):
        Result.read(tmp_path)


def test_of_equal_snapshots_the_earliest_is_chosen() -> None:
    result = Result(Path(), {}, {}, {}, {"iffi": {1: 0.4, 2: 0.6, 3: 0.6}}, "", ())
    assert result.chosen == {"iffi": 2}


def test_the_mean_is_over_what_is_known() -> None:
    assert mean_over_clients({"iffi": {"a": 0.5, "b": None, "c": 1.0}, "none": {"a": None}}) == {"iffi": 0.75}
