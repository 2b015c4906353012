"""The record of a run, read from its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import small_recipe
from oneround.data import Dataset
from oneround.errors import OutOfTime, ProtocolError, RunError
from oneround.runs.log import MetricsLog
from oneround.runs.record import RunRecord, flat, keys_of
from oneround.simulate import run


@pytest.fixture(scope="module")
def folder(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with λ, gradients, validation and three snapshots."""
    changes: dict[str, Any] = {"partition__clients": 3, "partition__alpha": 0.3, "local__workers": 1, "validation": 0.1}
    recipe = small_recipe("v12", training__epochs=3, snapshots=1, trace__every=1, fusion=["iffi", "average"], **changes)
    copy = tmp_path_factory.mktemp("record") / "run"
    run(recipe, copy, data=digits)
    return copy


def damaged(folder: Path, target: Path, *names: str) -> Path:
    shutil.copytree(folder, target)
    for name in names:
        (target / name).write_bytes(b"{torn")
    return target


def test_a_folder_is_read_whole(folder: Path) -> None:
    record, result = RunRecord.read(folder), json.loads((folder / "result.json").read_text())
    events = list(MetricsLog(folder / "metrics.jsonl"))
    assert record.finished and record.unread == () and record.path == folder
    assert record.accuracy == {name: score["accuracy"] for name, score in result["rules"].items()}
    assert record.local_accuracy == {name: score["accuracy"] for name, score in result["clients"].items()}
    assert (record.main_rule, record.method, record.partition_seed, record.trains) == (
        "iffi",
        "etf-attenuated",
        1,
        True,
    )
    assert record.partition_digest == result["partition"] == record.partition["digest"]
    assert record.curves["iffi"] == {
        event["epoch"]: event["accuracy"]
        for event in events
        if event["event"] == "snapshot" and event["rule"] == "iffi"
    }
    assert set(record.validation) == {"iffi", "average"} and record.reached == 3 and record.feature_size == 16
    assert record.test_counts == [sum(row) for row in result["rules"]["iffi"]["confusion"]]
    assert record.class_names == tuple(map(str, range(10))) and record.measured_on["commit"] == "under test"
    assert record.keys == keys_of(record.recipe.plain())


def test_traces_are_those_of_the_log(folder: Path) -> None:
    record = RunRecord.read(folder)
    events = [event for event in MetricsLog(folder / "metrics.jsonl") if event["event"] == "epoch"]
    for event in events:
        client, epoch = event["client"], event["epoch"]
        assert record.trace("lambda_raw")[client][epoch] == event["lambda_raw"]
        for tensor, measured in event["gradients"].items():
            for pair, value in measured["cosine"].items():
                if value is not None:
                    assert record.cosines()[pair, tensor][client][epoch] == value
    assert record.trace("never measured") == {} and len(record.series("client_000", "base", "align")) == 3
    assert record.series("client_000", "base", "never measured") == [] == record.series("nobody", "base")


def test_clients_are_those_with_data(folder: Path, tmp_path: Path) -> None:
    copy = damaged(folder, tmp_path / "run")
    partition = json.loads((copy / "partition.json").read_text())
    partition["class_counts"] = [[1] * 10, [0] * 10, [3] * 10, [2] * 10]
    (copy / "partition.json").write_text(json.dumps(partition))
    record = RunRecord.read(copy)
    assert len(record.partition_counts) == 4 and record.clients == ["client_000", "client_002", "client_003"]
    assert record.largest(2) == ["client_002", "client_003"]
    (copy / "partition.json").unlink()
    bare = RunRecord.read(copy)
    assert bare.partition_counts == {} and bare.counts == RunRecord.read(folder).counts, "as uploads disclose them"


def test_before_the_result_the_last_snapshot_counts(folder: Path, tmp_path: Path) -> None:
    copy = damaged(folder, tmp_path / "run")
    (copy / "result.json").unlink()
    record = RunRecord.read(copy)
    assert not record.finished and record.accuracy == {name: curve[3] for name, curve in record.curves.items()}
    assert record.local_accuracy == RunRecord.read(folder).local_accuracy and record.remarks == ()
    assert record.partition_digest == RunRecord.read(folder).partition_digest and record.test_counts == []


def test_uploads_and_states_are_ahead_of_the_log(digits: Dataset, folder: Path, tmp_path: Path) -> None:
    copy = damaged(folder, tmp_path / "run")
    (copy / "metrics.jsonl").unlink()
    assert RunRecord.read(copy).measurements.epochs == RunRecord.read(folder).measurements.epochs
    slow = small_recipe(training__epochs=3, snapshots=0, partition__clients=2, local__workers=1)
    with pytest.raises(OutOfTime):
        run(slow, tmp_path / "half", data=digits, deadline=0.0)
    begun = RunRecord.read(tmp_path / "half")
    assert begun.trained and begun.reached == 1 and begun.curves == {} and begun.main_rule == slow.fusion[0].label


@pytest.mark.parametrize("name", ["result.json", "partition.json", "environment.json", "broadcast.safetensors"])
def test_what_is_damaged_is_left_out_or_refused(folder: Path, tmp_path: Path, name: str) -> None:
    copy = damaged(folder, tmp_path / "run", name)
    record = RunRecord.read(copy)
    (remark,) = record.unread
    assert remark.startswith("left out: ") and name in remark
    assert record.measurements == RunRecord.read(folder).measurements
    assert RunRecord.read(copy, strict=["study.json"]).unread == record.unread
    if name.endswith("json"):
        with pytest.raises(RunError, match=rf"{name}: damaged \(.*\); remove it"):
            RunRecord.read(copy, strict=[name])


def test_only_a_recipe_must_be_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="not a run folder"):
        RunRecord.read(tmp_path)
    shutil.copy(folder / "recipe.yaml", tmp_path)
    record = RunRecord.read(tmp_path)
    assert (record.unread, record.accuracy, record.clients, record.reached, record.measured_on) == ((), {}, [], 0, {})


def test_the_bound_is_that_of_the_study(folder: Path, tmp_path: Path) -> None:
    copy = damaged(folder, tmp_path / "run")
    for text, bound in (('{"centralised": 0.97}', 0.97), ("{}", None), ('{"centralised": "much"}', None)):
        (tmp_path / "study.json").write_text(text)
        assert RunRecord.read(copy).bound == bound
    (tmp_path / "study.json").write_text("{torn")
    assert "study.json" in RunRecord.read(copy).unread[0]


def test_keys_of_a_recipe() -> None:
    tree = {"a": {"b": 1, "c": []}, "d": [{"e": 2}, {"e": 3}], "f": {}, "g": [1, 2]}
    assert dict(flat(tree)) == {"a.b": 1, "a.c": "[]", "d.0.e": 2, "d.1.e": 3, "f": "{}", "g": "[1, 2]"}
    old = keys_of({"training": {"epochs": 7}})
    assert old["training.epochs"] == 7 and old["rounds"] == 1, "what came later has its default"
