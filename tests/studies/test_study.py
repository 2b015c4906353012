"""One recipe over several partitions: rules are paired partition by partition, beside the clients alone and all data in one place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import small_recipe
from oneround.errors import RecipeError
from oneround.runs.result import Result
from oneround.studies.study import Study, study

RECIPE = small_recipe(partition__clients=2, partition__alpha=0.5, fusion=["average", "iffi"], local__workers=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return study(RECIPE, tmp_path_factory.mktemp("study"), [1, 2])


def test_every_partition_is_a_run_of_its_own(finished: Study) -> None:
    kept = json.loads((finished.folder / "study.json").read_text())
    assert kept == json.loads(json.dumps(finished.record()))
    assert kept["partitions"] == [1, 2] and len(set(kept["partition_digests"])) == 2
    for number, seed in enumerate((1, 2)):
        result = Result.read(finished.folder / f"partition_{seed}")
        assert {rule: values[number] for rule, values in kept["rules"].items()} == dict(result.rules)
        assert kept["clients"][number] == dict(result.clients)
    assert (finished.folder / "accuracy.png").stat().st_size > 200


def test_all_data_in_one_place_beats_each_client_alone(finished: Study) -> None:
    assert 0.1 < finished.centralised < 1
    values = finished.accuracies
    clients = [list(result.clients.values()) for result in finished.results]
    assert values["best client alone"] == [pytest.approx(100 * max(each)) for each in clients]
    assert values["mean client alone"] == [pytest.approx(100 * float(np.mean(each))) for each in clients]
    assert values["centralised"] == [pytest.approx(100 * finished.centralised)] * 2


def test_without_clients_of_their_own_the_rows_are_left_out(finished: Study) -> None:
    masked = replace(finished, results=tuple(replace(result, clients={}) for result in finished.results))
    assert not {"best client alone", "mean client alone"} & masked.accuracies.keys()


def test_resumed_nothing_is_trained_again(finished: Study) -> None:
    with pytest.raises(RecipeError, match="there is a run here already; continue with --resume"):
        study(RECIPE, finished.folder, [1, 2])
    uploads = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*.safetensors")}
    again = study(RECIPE, finished.folder, [1, 2], resume=True)
    assert again.record() == finished.record()
    assert uploads == {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*.safetensors")}


def test_labels_that_are_wrong_at_some_clients_are_for_sweeps(tmp_path: Path) -> None:
    noisy = small_recipe(label_noise={"clients": 1, "share": 0.5})
    with pytest.raises(RecipeError, match="label_noise: a study has one set of labels"):
        study(noisy, tmp_path / "s", [1])
    assert not (tmp_path / "s").exists()
